#!/usr/bin/env python3
"""Draws docs/performance.json, which ``scripts/bench.py --json`` writes, as the SVG files of docs/performance.md."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import svg

DOCS = Path(__file__).parents[1] / "docs"
DATA = DOCS / "performance.json"
OURS, OTHER, GRID, SOFT = "#2563b8", "#b3b9c1", "#e3e6ea", "#59636e"
MISSED, DARK = "#c2410c", "#0b2545"
LOWER_IS_BETTER = {"s", "ms", "MiB"}
"""Units of measures whose target is an upper bound."""
TARGETS = {
    "P1": "renamed model / loopback copy",
    "P2": "rows and axes moved / loopback copy",
    "P3": "own reader / h5py",
    "P4": "mount / conversion, until loaded",
    "P5": "peak memory of the daemon",
    "P6": "mount is ready, 70B",
    "P7": "random 4 KiB read",
    "P8": "two readers / one reader",
    "FAR": "source at 1 ms a request / copy there",
    "PEERS": "fastest other tool",
}
"""Measure to what it compares."""
RATES = (
    ("P1 GPT-J, renamed", ("P1", "gptj"), "ckptfs", "loopback"),
    ("P2 Llama, rotary rows", ("P2", "llama"), "ckptfs", "loopback"),
    ("P2 GPT-2, transposed", ("P2", "gpt2"), "ckptfs", "loopback"),
    ("P3 bfloat16", ("P3", "bfloat16"), "ckptfs", "h5py into one array"),
    ("P3 float32", ("P3", "float32"), "ckptfs", "h5py into one array"),
    ("FAR, 4 MiB read-ahead", ("FAR",), "ckptfs, 4 MiB", "loopback, 4 MiB"),
    ("FAR, 128 KiB read-ahead", ("FAR",), "ckptfs, 128 KiB", "loopback, 128 KiB"),
)
"""Label of a pair of bars, where its rates stand in the data, and the names of both."""


def main() -> None:
    """Write the pictures beside the data."""
    for name, content in pictures(json.loads(DATA.read_text())).items():
        (DOCS / name).write_text(content)
        print(DOCS / name)


def pictures(data: dict[str, Any]) -> dict[str, str]:
    """File name to the SVG text of each picture."""
    return {"performance-targets.svg": targets(data), "performance-rates.svg": rates(data)}


def margin(result: dict[str, Any], value: float) -> float:
    """How many times better than its target *value* is; below 1 it misses it."""
    return float(result["target"] / value if result["unit"] in LOWER_IS_BETTER else value / result["target"])


def targets(data: dict[str, Any]) -> str:
    """Each measure as a multiple of its target, on a logarithmic axis: a bar for the median, a dot for each run."""
    rows = [name for name in TARGETS if name in data]
    left, top, row, width = 330, 58, 30, 900
    low, high = 0.5, 2.0 ** math.ceil(math.log2(max(margin(data[r], v) for r in rows for v in data[r]["runs"])))
    per_octave = (width - left - 130) / math.log2(high / low)

    def at(times: float) -> float:
        return left + per_octave * math.log2(max(times, low) / low)

    def body() -> Iterator[str]:
        bottom = top + row * len(rows)
        yield svg.rect(0, 0, width, bottom + 44, "#ffffff", 8)
        yield svg.text(20, 30, "Times better than the target (bar: median; dots: single runs)", bold=True, size=15)
        for power in range(int(math.log2(high / low)) + 1):
            tick = low * 2**power
            met = tick == 1
            yield svg.line(at(tick), top - 8, at(tick), bottom, SOFT if met else GRID, 1.5 if met else 1)
            yield svg.text(at(tick), bottom + 20, f"{tick:g} ×", fill=SOFT, size=12, anchor="middle")
        for i, name in enumerate(rows):
            result, y = data[name], top + row * i
            best = margin(result, result["value"])
            yield svg.text(20, y + 16, name, bold=True)
            yield svg.text(72, y + 16, TARGETS[name], fill=SOFT)
            fill = OURS if result["met"] else MISSED
            yield svg.rect(min(at(1), at(best)), y + 6, abs(at(best) - at(1)), 12, fill, 2)
            yield from (svg.circle(at(margin(result, run)), y + 12, 2.5, DARK) for run in result["runs"])
            end = max([best, *(margin(result, run) for run in result["runs"])])
            yield svg.text(at(end) + 10, y + 16, figure(result), size=12)

    return svg.picture(width, top + row * len(rows) + 44, "ckptfs against its targets", body())


def rates(data: dict[str, Any]) -> str:
    """Throughput of ckptfs and of what it is compared with: medians as bars, least and largest as lines."""
    pairs = [(label, _at(data, *path), ours, other) for label, path, ours, other in RATES if path[0] in data]
    left, top, row, width = 190, 70, 46, 860
    high = math.ceil(max(max(found[a]["max"], found[b]["max"]) for _, found, a, b in pairs))
    scale = (width - left - 80) / high

    def bar(found: dict[str, float], y: float, fill: str) -> Iterator[str]:
        yield svg.rect(left, y, found["median"] * scale, 14, fill, 2)
        if found["max"] > found["min"]:
            yield svg.line(left + found["min"] * scale, y + 7, left + found["max"] * scale, y + 7, DARK, 1.5)
        end = left + max(found["median"], found["max"]) * scale
        yield svg.text(end + 8, y + 12, f"{found['median']:.2f}", size=12)

    def body() -> Iterator[str]:
        bottom = top + row * len(pairs)
        yield svg.rect(0, 0, width, bottom + 30, "#ffffff", 8)
        yield svg.text(20, 28, "Throughput in GB/s", bold=True, size=15)
        for x, fill, words in ((20, OURS, "ckptfs"), (100, OTHER, "loopback of a copy (P1, P2, FAR), h5py (P3)")):
            yield svg.rect(x, 42, 12, 12, fill, 2)
            yield svg.text(x + 18, 53, words, fill=SOFT, size=12)
        for tick in range(high + 1):
            yield svg.line(left + tick * scale, top - 4, left + tick * scale, bottom - 6, GRID)
            yield svg.text(left + tick * scale, bottom + 14, str(tick), fill=SOFT, size=12, anchor="middle")
        for i, (label, found, ours, other) in enumerate(pairs):
            y = top + row * i
            yield svg.text(left - 12, y + 20, label, anchor="end")
            yield from bar(found[ours], y, OURS)
            yield from bar(found[other], y + 16, OTHER)

    return svg.picture(width, top + row * len(pairs) + 30, "Throughput of ckptfs and of a loopback or h5py", body())


def figure(result: dict[str, Any]) -> str:
    """The value of a measure with its unit, to three digits, and the target."""
    value, unit = result["value"], result["unit"]
    digits = f"{value:.0f}" if value >= 100 else f"{value:.3g}"
    named = "" if unit == "ratio" else f" {unit}"
    return f"{digits}{named} ({'≤' if unit in LOWER_IS_BETTER else '≥'} {result['target']:g})"


def _at(data: dict[str, Any], *path: str) -> dict[str, Any]:
    for name in path:
        data = data[name]
    return data


if __name__ == "__main__":
    main()
