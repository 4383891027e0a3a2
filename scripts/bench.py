#!/usr/bin/env python3
"""Measures ckptfs against its targets P1 to P8 and prints a table; see docs/performance.md.

Run it with the Python of the environment that ckptfs is installed in: .venv/bin/python scripts/bench.py
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable

import click
from benchmarks import far, footprint, peers, random_reads, readiness, throughput
from benchmarks.common import Bench, Result, Skipped
from benchmarks.machine import work_folder, write

from ckptfs.cli.options import size

MEASURES: dict[str, tuple[str, tuple[str, ...], Callable[[Bench], Result]]] = {
    "P1": ("cat of a renamed model / loopback of its copy", ("h5py", "hdf5plugin"), throughput.rename_only),
    "P2": ("the same, rows and axes moved (worse of GPT-2, Llama)", ("h5py", "hdf5plugin"), throughput.moved),
    "P3": ("every tensor, own reader / h5py (worse of bf16, f32)", ("h5py", "hdf5plugin"), throughput.own_reader),
    "P4": ("mount + from_pretrained, against a conversion", ("h5py", "torch", "transformers"), readiness.first_model),
    "P5": ("peak memory of the daemon, 70B and 7B streamed", ("h5py", "lz4"), footprint.peak_memory),
    "P6": ("mount ready, Llama 70B with AdamW state", ("h5py", "lz4"), readiness.ready),
    "P7": ("random 4 KiB reads, median", ("h5py", "hdf5plugin"), random_reads.random_reads),
    "P8": ("two readers / one reader", ("h5py", "hdf5plugin"), throughput.two_readers),
    "FAR": ("P2's Llama on a file server, 1 ms a request / its copy there", ("h5py", "hdf5plugin"), far.far_source),
    "PEERS": ("a tensor: ckptfs / the fastest of h5py, hdfuse, ratarmount", ("h5py", "hdf5plugin"), peers.others),
}
"""Measure to what it is, the packages that it needs, and its function."""
RUNS, ENOUGH = 5, 3
"""Repeats of a comparison, and how many do where they take so long that the whole would not end in ten minutes."""


def measure_names(context: click.Context, parameter: click.Parameter, text: str | None) -> list[str]:
    """The names in ``P1,P3``; all without *text*."""
    names = text.upper().split(",") if text else list(MEASURES)
    unknown = [name for name in names if name not in MEASURES]
    if unknown:
        raise click.BadParameter(f"{', '.join(unknown)}: the measures are {', '.join(MEASURES)}")
    return names


@click.command()
@click.option("--json", "json_file", type=click.Path(), metavar="FILE", help="Write the results there, too.")
@click.option("--work", type=click.Path(), metavar="DIR", help="Folder for the checkpoints, 5 GB (a temporary one).")
@click.option("--size", "nbytes", type=size, default="1GB", show_default=True, help="Size of the checkpoints to read.")
@click.option("--only", callback=measure_names, metavar="P1,P3", help="Only these measures.")
@click.option(
    "--checkpoint", type=click.Path(exists=True), metavar="FILE", help="A Cerebras checkpoint instead of made ones."
)
@click.option("--model", metavar="NAME", help="Its model family, where it does not tell.")
@click.option(
    "--config", type=click.Path(exists=True), metavar="FILE", help="Its model config, where it does not tell."
)
@click.option("--converter", metavar="PYTHON", help="Python that has the public converter, for P4.")
@click.option("--cstorch", metavar="PYTHON", help="Python that has cerebras_pytorch, for P4.")
@click.option(
    "--runs", type=click.IntRange(1), metavar="N", help="Repeats of each comparison (5, or 3 where they take long)."
)
@click.option("--keep", is_flag=True, help="Leave what was made.")
def main(
    json_file: str | None,
    work: str | None,
    nbytes: int,
    only: list[str],
    checkpoint: str | None,
    model: str | None,
    config: str | None,
    converter: str | None,
    cstorch: str | None,
    runs: int | None,
    keep: bool,
) -> None:
    """Measure ckptfs against its targets P1 to P8; see docs/performance.md."""
    if not os.path.exists("/dev/fuse"):
        raise click.ClickException("/dev/fuse does not exist; 'ckptfs doctor' says what to do")
    source = os.path.abspath(checkpoint) if checkpoint else None
    found: dict[str, Result] = {}
    with work_folder(work, keep) as folder:
        view = [*(("--model", model) if model else ()), *(("--config", os.path.abspath(config)) if config else ())]
        enough = None if runs else ENOUGH
        bench = Bench(folder, nbytes, runs or RUNS, source, keep, tuple(view), converter, cstorch, enough)
        for name in only:
            result = _measure(name, bench)
            if result is not None:
                found[name] = result
                click.echo(row(name, result))
            if json_file:
                write_json(json_file, found)


def row(name: str, result: Result) -> str:
    """One line of the table, with what was missed below it."""
    values = f"{min(result.runs):.3g}..{max(result.runs):.3g} of {len(result.runs)}"
    target = f"{'<=' if result.at_most else '>='} {result.target:g}"
    line = f"{name}  {MEASURES[name][0]:<56} {result.value:>8.3g} {result.unit:<11} {target:>8}  "
    line += f"{'met' if result.met else 'missed'} ({values})"
    return "\n    ".join([line, *([result.unmet] if result.unmet else []), *result.notes])


def write_json(path: str, found: dict[str, Result]) -> None:
    """``{"P1": {"value", "unit", "target", "met", "runs", …}, …}``"""
    write(path, {name: result.as_json() for name, result in found.items()})


def _measure(name: str, bench: Bench) -> Result | None:
    """The result, or None after saying why there is none."""
    title, packages, measure = MEASURES[name]
    missing = [p for p in packages if importlib.util.find_spec(p) is None]
    if missing:
        click.echo(f"{name}  {title}: skipped, needs {', '.join(missing)} (pip install {' '.join(missing)})")
        return None
    start = time.perf_counter()
    try:
        result = measure(bench)
    except Skipped as why:
        click.echo(f"{name}  {title}: skipped, {why}")
        return None
    result.more["took s"] = time.perf_counter() - start
    return result


if __name__ == "__main__":
    main()
