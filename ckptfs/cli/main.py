"""The command line. One module per command, loaded when it is called."""

from __future__ import annotations

import errno
import importlib
import io
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import click

from ckptfs import __version__
from ckptfs.cli.advice import advised
from ckptfs.errors import CkptfsError, MountError

COMMANDS = {
    "mount": "ckptfs.cli.mount",
    "umount": "ckptfs.cli.umount",
    "convert": "ckptfs.cli.convert",
    "convert-config": "ckptfs.cli.convert_config",
    "fold-lora": "ckptfs.cli.fold_lora",
    "convert-data-iter-state": "ckptfs.cli.convert_data_iter_state",
    "fix-checkpoint-spec": "ckptfs.cli.fix_checkpoint_spec",
    "h5-to-tensorflow": "ckptfs.cli.h5_to_tensorflow",
    "tensorflow-to-h5": "ckptfs.cli.tensorflow_to_h5",
    "info": "ckptfs.cli.info",
    "ls": "ckptfs.cli.ls",
    "cat": "ckptfs.cli.cat",
    "diff": "ckptfs.cli.diff",
    "check": "ckptfs.cli.check",
    "list": "ckptfs.cli.list",
    "doctor": "ckptfs.cli.doctor",
}
"""Command to the module that has it as ``command``, in the order of the help page."""
ALIASES = {"fold-lora-checkpoint": "fold-lora", "data-iter-state-conversion": "convert-data-iter-state"}
"""Names of the public scripts. Underscores count as dashes."""

_INTERRUPTED, _NOBODY_READS, _TERMINATED = 130, 141, 143
"""Exit codes of a shell command that SIGINT, SIGPIPE or SIGTERM ended."""
_NO_COMMAND = 2
LIMITS = "; the machine or this session allows no more: see 'ulimit -a', and the memory limit of the job or container"


@dataclass(slots=True)
class Settings:
    """What the whole command line shares (click's ``obj``)."""

    debug: bool = False
    is_process: bool = False
    """Whether the process is there for this command line alone."""

    def leave(self) -> None:
        """End a process whose work is done, without freeing what it made. Otherwise does nothing.

        A daemon shares the memory: each object that is freed here would be one more page that is no longer shared, and
        for 100,000 tensors it takes a tenth of a second.
        """
        if self.is_process:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)


class Commands(click.Group):
    """A group whose commands are imported when they are needed. Each knows ``--debug``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        name = cmd_name.replace("_", "-")
        module = COMMANDS.get(ALIASES.get(name, name))
        if module is None:
            return None
        command: click.Command = importlib.import_module(module).command
        if not any(p.name == "debug" for p in command.params):
            command.params.append(_debug_option())
        return command

    def invoke(self, ctx: click.Context) -> Any:
        # Batch systems end jobs with SIGTERM: unwind as for Ctrl-C, so that no half-written file is left.
        signal.signal(signal.SIGTERM, _terminate)
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except BrokenPipeError:  # 'ckptfs cat … | head': the reader has enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise click.exceptions.Exit(_NOBODY_READS) from None
        except Terminated:
            raise click.exceptions.Exit(_TERMINATED) from None
        except KeyboardInterrupt:
            raise click.exceptions.Exit(_INTERRUPTED) from None


class Terminated(KeyboardInterrupt):
    """SIGTERM came."""


def _terminate(number: int, frame: object) -> NoReturn:
    raise Terminated


def main(args: Sequence[str] | None = None) -> NoReturn:
    """The command ``ckptfs``: run it and exit with its code."""
    # numpy's linear algebra, not used here, starts threads that spin for a while beside the indexing processes.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    sys.exit(run(args, Settings(is_process=True)))


def h5_to_tensorflow() -> NoReturn:
    """The command ``h5-to-tensorflow``."""
    main(["h5-to-tensorflow", *sys.argv[1:]])


def tensorflow_to_h5() -> NoReturn:
    """The command ``tensorflow-to-h5``."""
    main(["tensorflow-to-h5", *sys.argv[1:]])


def run(args: Sequence[str] | None = None, settings: Settings | None = None) -> int:
    """Run one command line; the exit code. An error is one line on stderr, with a traceback under ``--debug``."""
    settings = settings or Settings()
    line = list(sys.argv[1:] if args is None else args)
    _survive_odd_names()
    try:
        code = cli.main(line or ["--help"], prog_name="ckptfs", standalone_mode=False, obj=settings)
    except CkptfsError as exc:
        return _fail(settings, advised(exc), exc.exit_code)
    except click.ClickException as exc:
        where = exc.ctx.command_path if isinstance(exc, click.UsageError) and exc.ctx else "ckptfs"
        return _fail(settings, f"{exc.format_message().rstrip('.')}; see {where} --help", 2)
    except click.Abort:
        return _INTERRUPTED
    except OSError as exc:
        named = f"{os.fsdecode(exc.filename)}: " if exc.filename is not None else ""
        limited = exc.errno in (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
        hint, code = (LIMITS, MountError.exit_code) if limited else ("", CkptfsError.exit_code)
        return _fail(settings, f"{named}{exc.strerror or exc}{hint}", code)
    except MemoryError:
        return _fail(settings, f"not enough memory{LIMITS}", MountError.exit_code)
    except (RuntimeError, ImportError) as exc:
        limit = _limit_in(str(exc))
        if limit is None:
            raise
        return _fail(settings, f"{limit}{LIMITS}", MountError.exit_code)
    if not line:
        return _NO_COMMAND
    return code if isinstance(code, int) else 0


def _limit_in(message: str) -> str | None:
    """What a library could not get, when *message* says that it was memory or a thread; else None."""
    if "new thread" in message:
        return "cannot start a thread"
    return (
        "not enough memory to load a library"
        if "cannot allocate" in message.lower() or "map segment" in message
        else None
    )


def _survive_odd_names() -> None:
    """Names that the terminal's encoding lacks are escaped: a listing must not end half way."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def _fail(settings: Settings, message: str, code: int) -> int:
    if settings.debug:
        traceback.print_exc()
    print(f"ckptfs: {' '.join(message.split())}", file=sys.stderr)
    return code


def _debug_option() -> click.Option:
    def remember(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if value:
            ctx.ensure_object(Settings).debug = True

    return click.Option(
        ["--debug"], is_flag=True, expose_value=False, is_eager=True, callback=remember, help="Show tracebacks."
    )


@click.group(
    cls=Commands,
    params=[_debug_option()],
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, message="ckptfs %(version)s")
def cli() -> None:
    """Mount large-model checkpoints as folders: Cerebras .mdl files seen as Hugging Face models, without converting.

    Exit codes: 0 done, 1 refused or different, 2 wrong usage, 3 broken input, 4 the machine does not allow it.
    """
