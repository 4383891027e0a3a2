"""Elements of SVG pictures as text: the little that the scripts of the documents draw with."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

SANS = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
INK = "#1f2328"
MONO = "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace"


def picture(width: float, height: float, title: str, body: Iterable[str]) -> str:
    """A whole SVG file."""
    size = f'width="{number(width)}" height="{number(height)}" viewBox="0 0 {number(width)} {number(height)}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title)}">'
    return "\n".join([head, f"<title>{escape(title)}</title>", *body, "</svg>", ""])


def rect(x: float, y: float, width: float, height: float, fill: str, radius: float = 0) -> str:
    """A filled rectangle."""
    return f"<rect{_attributes(x=x, y=y, width=width, height=height, rx=radius)} fill='{fill}'/>"


def line(x1: float, y1: float, x2: float, y2: float, stroke: str, width: float = 1, dashes: str = "") -> str:
    """A straight line."""
    dashed = f" stroke-dasharray='{dashes}'" if dashes else ""
    return f"<line{_attributes(x1=x1, y1=y1, x2=x2, y2=y2)} stroke='{stroke}' stroke-width='{number(width)}'{dashed}/>"


def circle(x: float, y: float, radius: float, fill: str) -> str:
    """A filled circle."""
    return f"<circle{_attributes(cx=x, cy=y, r=radius)} fill='{fill}'/>"


def text(
    x: float, y: float, words: str, *, fill: str = INK, size: float = 13, anchor: str = "start", bold: bool = False
) -> str:
    """Text whose base line begins (or ends, or has its middle) at a point."""
    weight = " font-weight='600'" if bold else ""
    style = f"font-family=\"{SANS}\" font-size='{number(size)}' fill='{fill}' text-anchor='{anchor}'{weight}"
    return f"<text{_attributes(x=x, y=y)} {style}>{escape(words)}</text>"


def number(value: float) -> str:
    """A coordinate with at most two decimals: the same text on every machine."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _attributes(**values: float) -> str:
    return "".join(f" {name}='{number(value)}'" for name, value in values.items())
