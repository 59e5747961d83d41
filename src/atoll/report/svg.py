"""What the pictures that we write as SVG share: the frame, text and its colours."""

from __future__ import annotations

from collections.abc import Iterable

from atoll.report.html import Html, tag

INK, MUTED = "#1b2a33", "#66757f"


def picture(width: int, height: int, parts: Iterable[Html]) -> Html:
    """Make the ``<svg>`` element of a picture, with a white background. Lengths are in pixels."""
    return tag(
        "svg",
        tag("rect", width=str(width), height=str(height), fill="#ffffff"),
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width} {height}",
        width=str(width),
        height=str(height),
        font_family="system-ui, sans-serif",
    )


def text(x: float, y: float, words: str, size: int = 13, anchor: str = "", fill: str = INK) -> Html:
    """Make a line of text; ``anchor`` is ``"middle"`` or ``"end"``, and the start of the line if empty."""
    place = {"x": f"{x:.1f}", "y": f"{y:.1f}"}
    return tag("text", words, **place, font_size=str(size), text_anchor=anchor, fill=fill)
