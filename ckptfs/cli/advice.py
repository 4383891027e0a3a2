"""What a command adds to a message of the library: the option that helps."""

from __future__ import annotations

from ckptfs.errors import CkptfsError, MissingKey, UnknownFamily

_OPTIONS = {
    "config": " with --config",
    "drop_unmatched_keys": ". Use --drop-unmatched-keys to leave out what does not fit",
    "force": "; --force writes over it, --output-dir writes elsewhere",
    "log_file": " with --log-file FILE",
    "model": " with --model",
    "output_dir": " with --output-dir",
    "src_fmt": " with --src-fmt, such as cs-2.9",
}
_COMMANDS = {MissingKey: "'ckptfs ls' lists them", UnknownFamily: "'ckptfs list' shows all names"}


def advised(error: CkptfsError) -> str:
    """The message, and what to try."""
    message = str(error)
    for kind, command in _COMMANDS.items():
        if isinstance(error, kind):
            message += f" {command}" if message.endswith("?") else f"; {command}"
    return message + _OPTIONS.get(error.option, "")


def advised_reason(reason: str | None) -> str | None:
    """The same for a reason why there is no model view, or why a value is refused."""
    from ckptfs.conversion.resolve import NO_MODEL, UNKNOWN_MODEL
    from ckptfs.formats.source import OUTSIDE

    if reason is None:
        return None
    if reason == NO_MODEL:
        return f"{reason}; name it with --model and --config"
    if reason.startswith(UNKNOWN_MODEL):
        return f"{reason}; 'ckptfs list' shows all"
    return f"{reason}. Use --follow-links to allow it" if reason.endswith(OUTSIDE) else reason
