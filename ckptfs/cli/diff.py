"""``ckptfs diff``"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from ckptfs.cli.options import json_option, path_type, progress_option, reading_options, view_options
from ckptfs.cli.output import print_json, printable, shape_text
from ckptfs.cli.progress import progress_bar

if TYPE_CHECKING:
    from ckptfs.formats.source import Item, Source
    from ckptfs.tools.diff import Comparison, Difference

tolerance = click.FloatRange(min=0)
TOLERANCES = {"equal": (0.0, 0.0), "allclose": (1e-5, 1e-8)}
"""Relative and absolute tolerance of torch's operations."""


@click.command("diff")
@click.argument("a", type=path_type)
@click.argument("b", type=path_type)
@click.option("--keys", metavar="GLOB", multiple=True, help="Compare only keys that match (may be repeated).")
@click.option("--ignore", metavar="GLOB", multiple=True, help="Leave out keys that match (may be repeated).")
@click.option(
    "--prefix-a", metavar="TEXT", default="", help="Take only A's keys that begin so, without that beginning."
)
@click.option("--prefix-b", metavar="TEXT", default="", help="The same for B.")
@click.option("--rtol", type=tolerance, help="Relative tolerance (0).")
@click.option("--atol", type=tolerance, help="Absolute tolerance (0).")
@click.option(
    *("--tensor_comparison_op", "--tensor-comparison-op"),
    type=click.Choice(["equal", "allclose"]),
    default="equal",
    help="allclose: tolerances of 1e-5 and 1e-8 where none is given (equal).",
)
@click.option("--equal-nan", is_flag=True, help="Take NaN as equal to NaN.")
@click.option("--ignore-dtype", is_flag=True, help="Compare values across element types.")
@click.option("--structure", is_flag=True, help="Compare keys, element types and shapes; read no values.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing; the exit code tells.")
@progress_option
@json_option
@view_options
@reading_options
def command(a: str, b: str, as_json: bool, **options: Any) -> None:
    """Compare two checkpoints of any formats.

    Keys, element types, shapes and values of A and B: files, indexes, folders, also of a mount. With --tgt-fmt, what
    A would be in that format is compared with B. The values x of A and y of B are the same if
    |x - y| <= atol + rtol * |y|. Exit code: 0 the same, 1 different, 3 something cannot be read.
    """
    from ckptfs.cli.opening import opened
    from ckptfs.errors import UsageError
    from ckptfs.tools.diff import How, chosen, compare, data_nbytes

    keys, ignore = options["keys"], options["ignore"]
    with ExitStack() as stack:
        sources = [stack.enter_context(opened(path, follow_links=options["follow_links"])) for path in (a, b)]
        shown, more = _items(sources[0], options)
        first = chosen(shown, prefix=options["prefix_a"], keys=keys, ignore=[*ignore, *more])
        second = chosen(sources[1].items, prefix=options["prefix_b"], keys=keys, ignore=[*ignore, *more])
        if not first and not second:
            raise UsageError("no keys are left to compare; see --keys, --ignore and the prefixes")
        rtol, atol = TOLERANCES[options["tensor_comparison_op"]]
        how = How(
            rtol=rtol if options["rtol"] is None else options["rtol"],
            atol=atol if options["atol"] is None else options["atol"],
            equal_nan=options["equal_nan"],
            dtypes=not options["ignore_dtype"],
            values=not options["structure"],
        )
        wanted = how.values and not options["no_progress_bar"]
        with progress_bar(data_nbytes(first, second), wanted) as progress:
            found = compare(first, second, how, progress=progress)
    if as_json and not options["quiet"]:
        print_json({"a": a, "b": b, **found.plain()})
    elif not options["quiet"]:
        for line in _lines(found, first, second):
            click.echo(printable(line))
    raise click.exceptions.Exit(3 if found.errors else 0 if found.equal else 1)


def _items(source: Source, options: dict[str, Any]) -> tuple[dict[str, Item], list[str]]:
    """What is compared of A: itself, or what it would be in another format; and the keys that do not count.

    A checkpoint made from a Hugging Face model has metadata that other converters do not write.
    """
    from ckptfs.conversion import resolve
    from ckptfs.errors import UsageError
    from ckptfs.formats.source import Item

    names = ("model", "config", "src_fmt")
    if not options["tgt_fmt"]:
        if any(options[name] for name in (*names, "drop_unmatched_keys")):
            raise UsageError("--model, --config, --src-fmt and --drop-unmatched-keys go with --tgt-fmt")
        return source.items, []
    how = {name: options[name] for name in names}
    view = resolve.plan_view(source, options["tgt_fmt"], drop=options["drop_unmatched_keys"], **how)
    if view.state is not None:
        return view.state.items, []
    prefix, more = ("", []) if view.tgt == "hf" else ("model.", ["__metadata__.*"])
    return {prefix + key: Item(prefix + key, "tensor", tensor=tensor) for key, tensor in view.tensors.items()}, more


def _lines(found: Comparison, a: dict[str, Item], b: dict[str, Item]) -> Iterator[str]:
    yield from (f"only in A: {_named(a[key], key)}" for key in found.only_in_a)
    yield from (f"only in B: {_named(b[key], key)}" for key in found.only_in_b)
    yield from map(_line, found.different)
    yield from (f"not read:  {key}: {why}" for key, why in found.errors.items())
    yield from (f"not compared, an object that is not loaded: {key}" for key in found.not_compared)
    counts = {"only in A": found.only_in_a, "only in B": found.only_in_b, "not read": found.errors}
    counts |= {"different": {d.key for d in found.different}, "not compared": found.not_compared}
    yield ", ".join([f"{len(found.same)} the same", *(f"{len(keys)} {name}" for name, keys in counts.items() if keys)])


def _named(item: Item, key: str) -> str:
    if item.tensor is None:
        return f"{key} ({item.kind})"
    return f"{key} ({item.tensor.dtype.name} {shape_text(item.tensor.shape)})"


def _line(found: Difference) -> str:
    if found.n_elements is None:
        a, b = (shape_text(side) if found.what == "shape" else repr(side)[:80] for side in (found.a, found.b))
        return f"different: {found.key}: {found.what} {a} and {b}"
    where = f" at {list(found.index)}" if found.index else ""
    count = f"{found.n_different} of {found.n_elements} values"
    line = f"different: {found.key}: {count}, first {_number(found.a)} and {_number(found.b)}{where}"
    if found.largest is not None:
        line += f", by at most {found.largest:.6g}"
    return line + (f"; {found.n_nan} are NaN in both (see --equal-nan)" if found.n_nan else "")


def _number(value: object) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)
