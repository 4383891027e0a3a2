#!/usr/bin/env python3
"""Feeds damaged files to every reader and prints a table; see docs/security.md.

Run it with the Python of the environment that ckptfs is installed in, for example
.venv/bin/python scripts/fuzz.py --target all --inputs 10000
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.fuzz.runner import Report, make_input, run  # noqa: E402
from tests.fuzz.targets import TARGETS  # noqa: E402


@click.command()
@click.option("--target", default="all", show_default=True, help=f"all, or some of {','.join(TARGETS)}")
@click.option("--inputs", default=10_000, show_default=True, help="inputs for each target")
@click.option("--first", default=0, show_default=True, help="number of the first input")
@click.option("--seed", default=0, show_default=True)
@click.option("--jobs", default=1, show_default=True, help="targets at once")
@click.option("--save", type=click.Path(path_type=Path), default=Path("fuzz-findings"), show_default=True)
def main(target: str, inputs: int, first: int, seed: int, jobs: int, save: Path) -> None:
    """Exit code 1 when a reader did not handle an input; such inputs are saved as files."""
    names = list(TARGETS) if target == "all" else target.split(",")
    unknown = [name for name in names if name not in TARGETS]
    if unknown:
        raise click.UsageError(f"unknown target {', '.join(unknown)}; there are {', '.join(TARGETS)}")
    found = 0
    with ThreadPoolExecutor(jobs) as pool:
        for report in pool.map(lambda name: run(name, inputs, seed=seed, first=first), names):
            show(report, seed, save)
            found += len(report.findings)
    sys.exit(1 if found else 0)


def show(report: Report, seed: int, save: Path) -> None:
    """Print one target's line, and save what it found."""
    outcomes = ", ".join(f"{name} {n}" for name, n in report.outcomes.most_common())
    peak, seconds = report.peak >> 20, report.seconds
    click.echo(f"{report.target}: {report.n_inputs} inputs, {len(report.findings)} findings, ", nl=False)
    click.echo(f"peak {peak} MiB, {seconds:.0f} s: {outcomes}")
    for finding in report.findings:
        save.mkdir(parents=True, exist_ok=True)
        path = save / f"{report.target}-{seed}-{finding['index']}.bin"
        path.write_bytes(make_input(report.target, seed, finding["index"]))
        click.echo(f"  {path}: {finding['what']}\n{finding['trace']}")


if __name__ == "__main__":
    main()
