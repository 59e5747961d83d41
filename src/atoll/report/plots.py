"""A paper's figure drawn with our numbers, as SVG, by matplotlib."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Mapping, Sequence
from math import nan
from typing import TYPE_CHECKING, Any

from atoll.core.errors import UserError
from atoll.core.extras import missing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = 3  # panels in a row
SIZE = (4.6, 3.6)  # inches of a panel
MOST_TICKS = 12
TITLE_WIDTH = 55  # characters of a line that fit above a panel


def require_plots() -> None:
    """Check that figures can be drawn.

    Raises:
        UserError: matplotlib is not installed.
    """
    if why := missing("matplotlib", "figures", "the drawing of figures"):
        raise UserError(why)


def figure_svg(panels: Sequence[Mapping[str, Any]], title: str = "") -> str:
    """Draw panels; the same panels give the same text.

    Args:
        panels: Panels of `atoll.commands.figures.figure_data`; at least one.
        title: Title above all panels.

    Returns:
        The ``<svg>`` element.
    """
    import matplotlib
    from matplotlib.figure import Figure

    columns, colours = min(COLUMNS, len(panels)), _colours(panels)
    rows = -(-len(panels) // columns)
    # Glyphs as text: smaller, searchable, and independent of the installed fonts.
    with matplotlib.rc_context({"svg.hashsalt": "atoll", "svg.fonttype": "none", "font.size": 9.0}):
        figure = Figure(figsize=(SIZE[0] * columns, SIZE[1] * rows + 0.4), layout="constrained")
        figure.suptitle(title, wrap=True)
        for k, panel in enumerate(panels):
            axes = figure.add_subplot(rows, columns, k + 1)
            axes.set_title(textwrap.fill(panel["title"], TITLE_WIDTH))
            axes.set_xlabel(panel.get("x", ""))
            axes.set_ylabel(panel.get("y", ""))
            DRAW[panel["kind"]](axes, {**panel, "colours": colours})
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    return text[text.index("<svg") :]  # without the XML declaration, so that it can stand in a page


def _colours(panels: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A colour for each label of lines and bars: a label has the same in all panels."""
    from matplotlib import colormaps

    drawn = (one for panel in panels for name in ("series", "levels") for one in panel.get(name, ()))
    labels = list(dict.fromkeys(one["label"] for one in drawn))
    palette = colormaps["tab10" if len(labels) <= 10 else "tab20"]
    return {label: palette(k % palette.N) for k, label in enumerate(labels)}


def _lines(axes: Axes, panel: Mapping[str, Any]) -> None:
    for one in panel["series"]:
        known = zip(one["x"], one["y"], _error_bars(one), strict=True)
        xs, ys, spreads = zip(*((x, y, s) for x, y, s in known if y is not None), strict=True)
        label, colour = one["label"], panel["colours"][one["label"]]
        axes.errorbar(xs, ys, spreads, marker="o", markersize=3, capsize=2, color=colour, label=label)
    for one in panel["levels"]:
        colour = panel["colours"][one["label"]]
        axes.axhline(one["y"][0], linestyle="--", color=colour, label=one["label"])
    if panel["log"]:
        axes.set_xscale("log")
        places = sorted({x for one in panel["series"] for x in one["x"]})
        if len(places) <= MOST_TICKS:  # matplotlib's own labels of a short logarithmic axis overlap
            axes.set_xticks(places, [f"{x:g}" for x in places])
            axes.set_xticks([], minor=True)
    if any(one["label"] for one in [*panel["series"], *panel["levels"]]):
        axes.legend(fontsize="small")


def _error_bars(series: Mapping[str, Any]) -> list[float]:
    """Half the height of each error bar; NaN, which draws none, where one seed leaves the deviation unknown."""
    return [nan if spread is None else spread for spread in series["s"]]


def _bars(axes: Axes, panel: Mapping[str, Any]) -> None:
    series, groups = panel["series"], panel["groups"]
    width = 0.8 / len(series)
    for k, one in enumerate(series):
        at = [group + (k - (len(series) - 1) / 2) * width for group in range(len(groups))]
        heights = [value or 0.0 for value in one["y"]]
        colour = panel["colours"][one["label"]]
        axes.bar(at, heights, width, yerr=_error_bars(one), capsize=2, color=colour, label=one["label"])
    axes.set_xticks(range(len(groups)), groups, rotation=20, ha="right")
    values = [value for one in series for value in one["y"] if value is not None]
    if values and min(values) > 0:  # differences show, and the axis says where it starts
        axes.set_ylim(bottom=max(0.0, min(values) - (max(values) - min(values) or min(values) * 0.1)))
    if any(one["label"] for one in series):
        axes.legend(fontsize="small")


def _scatter(axes: Axes, panel: Mapping[str, Any]) -> None:
    for k, point in enumerate(panel["points"]):
        axes.plot([point["x"]], [point["y"]], "o", color=f"C{k % 10}", label=point["label"])
    axes.legend(fontsize="small")


def _boxes(axes: Axes, panel: Mapping[str, Any]) -> None:
    names = ("whislo", "q1", "med", "q3", "whishi")
    boxes: list[dict[str, Any]] = [dict(zip(names, box, strict=True)) for box in panel["boxes"]]
    axes.bxp(boxes, positions=panel["at"], showfliers=False)


def _ticks(labels: Sequence[str]) -> tuple[list[int], list[str]]:
    step = -(-len(labels) // MOST_TICKS) or 1
    return list(range(0, len(labels), step)), list(labels[::step])


def _heat(axes: Axes, panel: Mapping[str, Any]) -> None:
    image = axes.imshow(panel["values"], aspect="auto", cmap="Blues", interpolation="nearest")
    axes.figure.colorbar(image, ax=axes)
    axes.set_xticks(*_ticks(panel["columns"]), rotation=45, ha="right", fontsize="x-small")
    axes.set_yticks(*_ticks(panel["rows"]), fontsize="x-small")


def _stacked(axes: Axes, panel: Mapping[str, Any]) -> None:
    left = [0.0] * len(panel["rows"])
    for k, name in enumerate(panel["columns"]):
        widths = [counts[k] for counts in panel["values"]]
        axes.barh(panel["rows"], widths, left=left, color=f"C{k % 10}", label=name)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    if len(panel["columns"]) <= MOST_TICKS:
        axes.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1, 1))


def _map(axes: Axes, panel: Mapping[str, Any]) -> None:
    for k, name in enumerate(panel["names"]):
        points = [point for point, group in zip(panel["points"], panel["groups"], strict=True) if group == k]
        xs, ys = zip(*points, strict=True) if points else ((), ())
        grey = name == "other" and k == len(panel["names"]) - 1
        axes.scatter(
            xs, ys, s=4, color="#c8c8c8" if grey else f"C{k % 10}", label=name, zorder=1 if grey else 2
        )
    axes.set_xticks([])
    axes.set_yticks([])
    if len(panel["names"]) <= MOST_TICKS:
        axes.legend(fontsize="x-small", markerscale=2)


def _landscape(axes: Axes, panel: Mapping[str, Any]) -> None:
    lines = axes.contour(panel["xs"], panel["ys"], panel["loss"], levels=20, cmap="viridis")
    axes.clabel(lines, fontsize="x-small")
    xs, ys = zip(*panel["path"], strict=True)
    axes.plot(xs, ys, "o-", color="C3", markersize=3)
    axes.plot([0], [0], "*", color="C3", markersize=10)


DRAW: dict[str, Callable[[Axes, Mapping[str, Any]], None]] = {
    "lines": _lines,
    "bars": _bars,
    "scatter": _scatter,
    "boxes": _boxes,
    "heat": _heat,
    "stacked": _stacked,
    "map": _map,
    "landscape": _landscape,
}
