#!/usr/bin/env python3
"""How costs grow with the number of keys, the size of a tensor and the size of a model; see docs/performance.md.

Below each table stand the exponents of growth from row to row: 1 is linear, 2 would be quadratic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click
from benchmarks import growth
from benchmarks.common import Bench, finite
from benchmarks.machine import about, work_folder, write

from ckptfs.cli.options import size

PARTS = ("keys", "tensors", "models")
GROWTH: dict[str, tuple[str, tuple[str, ...]]] = {
    "keys": ("keys", ("mount s", "RSS MiB", "ls -l s", "ls -l again s", "read ms/tensor")),
    "tensors stored": ("bytes", ("first page ms", "CPU s/GB", "peak MiB")),
    "tensors packed": ("bytes", ("first page ms", "CPU s/GB", "peak MiB")),
}
"""Table to what it grows with, and the costs whose exponents are shown."""


def names(known: Sequence[str]) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """A callback for a list with commas of *known* names."""

    def parse(context: click.Context, parameter: click.Parameter, text: str) -> list[str]:
        found = [name.strip() for name in text.split(",") if name.strip()]
        wrong = [name for name in found if name not in known]
        if wrong:
            raise click.BadParameter(f"{', '.join(wrong)}: known are {', '.join(known)}")
        return found

    return parse


def sizes(context: click.Context, parameter: click.Parameter, text: str) -> list[int]:
    """Numbers or sizes with commas, ascending."""
    return sorted(size(part) for part in text.split(","))


@click.command()
@click.option(
    "--only", default=",".join(PARTS), callback=names(PARTS), metavar="keys,tensors", help="Only these parts."
)
@click.option("--keys", default="100,10000,100000", callback=sizes, show_default=True, help="Numbers of keys.")
@click.option(
    "--tensors", default="1KiB,32KiB,1MiB,32MiB,1GiB,8GiB", callback=sizes, show_default=True, help="Tensor sizes."
)
@click.option("--models", default=",".join(growth.SHAPES), callback=names(tuple(growth.SHAPES)), show_default=True)
@click.option("--stream", type=size, default="4GB", show_default=True, help="Bytes to read of each model.")
@click.option("--json", "json_file", type=click.Path(), metavar="FILE", help="Write the results there, too.")
@click.option("--work", type=click.Path(), metavar="DIR", help="Folder for the checkpoints (a temporary one).")
def main(
    only: list[str],
    keys: list[int],
    tensors: list[int],
    models: list[str],
    stream: int,
    json_file: str | None,
    work: str | None,
) -> None:
    """Measure how costs grow."""
    found: dict[str, Any] = {"machine": about()}
    with work_folder(work, keep=False) as folder:
        bench = Bench(folder, 0, 1)
        parts: dict[str, list[Callable[[], growth.Row]]] = {
            "keys": [lambda n=n: growth.by_keys(bench, n) for n in keys if "keys" in only],
            "tensors stored": [
                lambda n=n: growth.by_size(bench, n, packed=False) for n in tensors if "tensors" in only
            ],
            "tensors packed": [lambda n=n: growth.by_size(bench, n, packed=True) for n in tensors if "tensors" in only],
            "models": [lambda n=n: growth.by_model(bench, n, stream) for n in models if "models" in only],
        }
        for name, measures in parts.items():
            if measures:
                found[name] = table(name, measures)
            if json_file:
                write(json_file, finite(found))


def table(name: str, measures: Sequence[Callable[[], growth.Row]]) -> dict[str, Any]:
    """The rows, and their exponents, printed as they come."""
    rows: list[growth.Row] = []
    for measure in measures:
        rows.append(measure())
        if len(rows) == 1:
            click.echo(f"\n{name}\n  " + "  ".join(f"{column:>{width(column)}}" for column in rows[0]))
        click.echo("  " + "  ".join(f"{shown(value):>{width(column)}}" for column, value in rows[-1].items()))
    by, costs = GROWTH.get(name, ("", ()))
    exponents = {cost: growth.slopes(rows, by, cost) for cost in costs}
    for cost, found in exponents.items():
        if found:
            click.echo(f"  {cost}: grows as {by} to the power of {', '.join(f'{value:.2f}' for value in found)}")
    return {"rows": rows, "exponents": exponents}


def width(column: str) -> int:
    return max(10, len(column))


def shown(value: Any) -> str:
    """A cell."""
    if isinstance(value, float):
        return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


if __name__ == "__main__":
    main()
