"""Actions for signals while the main thread is in libfuse and runs no Python."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping


@contextlib.contextmanager
def handled(actions: Mapping[int, Callable[[], None]]) -> Iterator[None]:
    """Run the action of a signal when it arrives, one at a time in a thread. Enter it in the main thread.

    A handler in Python would wait until the main thread runs Python again. Python's handler in C writes a byte at once,
    in whichever thread the signal arrives (OpenBLAS has threads, too); our thread reads it. libfuse does not touch
    signals that have a handler.
    """
    receive, send = os.pipe()
    os.set_blocking(send, False)
    handlers = {number: signal.signal(number, lambda *_: None) for number in actions}
    for number in actions:
        signal.siginterrupt(number, False)
    wakeup = signal.set_wakeup_fd(send, warn_on_full_buffer=False)

    def act() -> None:
        with open(receive, "rb", buffering=0) as coming:
            while numbers := coming.read(64):
                for number in numbers:
                    if number in actions:
                        actions[number]()

    threading.Thread(target=act, name="signals", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.close(send)
