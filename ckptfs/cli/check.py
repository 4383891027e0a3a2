"""``ckptfs check``"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from ckptfs.cli.options import json_option, progress_option, reading_options, source_argument, view_options
from ckptfs.cli.output import print_json, printable, size_text
from ckptfs.cli.progress import progress_bar

if TYPE_CHECKING:
    from ckptfs.conversion.conversion import Conversion
    from ckptfs.formats.source import Source
    from ckptfs.tools.check import Report


@click.command("check")
@source_argument
@click.option("--values", is_flag=True, help="Also count NaN and infinite values, which are problems then.")
@progress_option
@json_option
@view_options
@reading_options
def command(source: str, values: bool, no_progress_bar: bool, as_json: bool, **options: Any) -> None:
    """Say what is wrong with a checkpoint.

    Reads all of it once: its structure (was it finished, does each key have its data), every tensor, every damaged
    chunk by key, the checksums of torch files. With --tgt-fmt also whether SOURCE can be converted, and the result is
    read. Exit code: 0 sound, 1 problems, 3 it cannot be opened at all.
    """
    from ckptfs.cli.opening import opened
    from ckptfs.tools.check import Report, check_data, check_layers, check_structure, check_sums, data_nbytes

    report = Report()
    with opened(source, follow_links=options.pop("follow_links")) as src:
        check_structure(report, src)
        view = _view(report, src, options)
        shown = view.tensors if view else {}
        if view and view.tgt == "hf":
            check_layers(report, shown, view.config)
        n = data_nbytes(src.tensors()) + data_nbytes(shown)
        with progress_bar(n, not no_progress_bar) as progress:
            check_data(report, src.tensors(), values=values, progress=progress)
            check_sums(report, src)
            check_data(report, shown, view=view.tgt if view else None, progress=progress)
        if as_json:
            about = {"source": src.path, "format": src.format, "format_version": src.format_version}
            print_json({**about, "release": src.release, "n_keys": len(src.items), **report.plain()})
        else:
            for line in _lines(report):
                click.echo(printable(line))
    raise click.exceptions.Exit(0 if report.sound else 1)


def _view(report: Report, source: Source, options: dict[str, Any]) -> Conversion | None:
    """The view that was asked for; a problem where the checkpoint does not fit the model."""
    from ckptfs.conversion import resolve
    from ckptfs.errors import ConfigError, MappingError, NoPath, ShapeError, UnknownFamily, UsageError
    from ckptfs.tools.check import Problem

    tgt, drop = options.pop("tgt_fmt"), options.pop("drop_unmatched_keys")
    if not tgt:
        if drop or any(options.values()):
            raise UsageError("--model, --config, --src-fmt and --drop-unmatched-keys go with --tgt-fmt")
        return None
    try:
        return resolve.plan_view(source, tgt, drop=drop, **options)
    except (UnknownFamily, NoPath):
        raise
    except (MappingError, ConfigError, ShapeError) as error:
        report.problems.append(Problem(None, f"cannot be shown as {tgt}: {error}"))
        return None


def _lines(report: Report) -> Iterator[str]:
    for problem in report.problems:
        where = f"{problem.key}{f' (as {problem.view})' if problem.view else ''}: " if problem.key else ""
        yield f"problem: {where}{problem.what}"
    for note in report.notes:
        yield f"note: {note}"
    n = len(report.problems)
    read = f"{report.n_tensors} tensor{'' if report.n_tensors == 1 else 's'}, {size_text(report.nbytes)} read"
    yield f"{read}: " + ("sound" if report.sound else f"{n} problem{'s' if n > 1 else ''}")
