"""Progress bars on stderr, where that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(total: int, wanted: bool) -> Iterator[Callable[[int], object] | None]:
    """A bar with rate and time left on stderr, where that is a terminal."""
    if not (wanted and sys.stderr.isatty()):
        yield None
        return
    from rich import progress as bars
    from rich.console import Console

    columns = (bars.BarColumn(), bars.DownloadColumn(), bars.TransferSpeedColumn(), bars.TimeRemainingColumn())
    with bars.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda n: bar.advance(task, n)
