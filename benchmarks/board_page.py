"""What the board's records say: tables, paired differences, a picture, and the ablation on our method's page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from atoll.report.paired import paired, verdict
from board_rows import HERE, SELECT, Board, Record
from pages import filled, markdown, mean_std

PAGE = HERE.parent / "docs" / "board.md"
OWN_PAGE = PAGE.parent / "methods" / "lagoon.md"
BEGIN, END = "<!-- made by benchmarks/board.py: begin -->", "<!-- made by benchmarks/board.py: end -->"
MEASURES = {  # heading → (key of an evaluation, factor, digits)
    "kNN %": ("knn/accuracy", 100, 2),
    "probe %": (SELECT, 100, 2),
    "−uniformity": ("geometry/uniformity", -1, 3),
    "effective rank": ("geometry/effective_rank", 1, 1),
}
HEADER = ("row", *MEASURES, "rate", "τ", "seeds", "CPU")


def values(records: Mapping[int, Record], heading: str) -> dict[int, float]:
    """A measure by seed, for the runs that have a result."""
    key, factor, _ = MEASURES[heading]
    return {
        seed: factor * record["evaluation"][key]
        for seed, record in records.items()
        if key in record["evaluation"]
    }


def measured(records: Mapping[int, Record]) -> list[str]:
    """Format the cells of all measures."""
    return [mean_std([*values(records, heading).values()], MEASURES[heading][2]) for heading in MEASURES]


def point_cells(point: Sequence[str]) -> list[str]:
    """Cells of the learning rate and the temperature; all keys of a temperature have the same value."""
    return [*(text.partition("=")[2] for text in point), "–"][:2]


def main_rows(board: Board, protocol: str, line: bool) -> Iterator[list[str]]:
    """Rows, or baselines, that have results."""
    for row in filter(None, map(board.resolve, board.rows.values())):
        records = board.finals(row.name, protocol)
        chosen = board.choice(row)
        if row.line != line or not records or chosen is None:
            continue
        failed = sum("failed" in record for record in records.values())
        count = f"{len(records) - failed}" + (f", {failed} failed" if failed else "")
        over = "" if board.rows[row.name].method else f" over {board.rows[row.base].title}"
        yield [row.title + over, *measured(records), *point_cells(chosen.point), count, capabilities(records)]


def capabilities(records: Mapping[int, Record]) -> str:
    """CPU capabilities of the runs: one for each seed if they differ."""
    found = [record["made"]["capability"] for _, record in sorted(records.items())]
    return ", ".join(found if len({*found}) > 1 else found[:1])


def untrained(board: Board, protocol: str) -> list[str]:
    """Cells of the untrained encoder, which all federated methods of a seed share that begin with one model."""
    by_row = (board.finals(name, protocol) for name in board.rows)
    records = next(filter(None, map(_begun_with_one_model, by_row)), {})
    initial = {seed: record["rounds"][0] for seed, record in records.items()}
    cells = ["Untrained", *measured(initial), "–", "–", str(len(initial))]
    return [*cells, capabilities({seed: records[seed] for seed in initial})]


def _begun_with_one_model(records: Mapping[int, Record]) -> dict[int, Record]:
    return {
        seed: record
        for seed, record in records.items()
        if record["rounds"] and "by_model" not in record["rounds"][0]["evaluation"]
    }


def differences(board: Board, protocol: str) -> Iterator[list[str]]:
    """Difference of each row from its base, of our own from the best of the papers', and from the best of all."""
    rows = [*filter(None, map(board.resolve, board.rows.values()))]
    compared = [(row.name, row.base, "") for row in rows]
    if board.own:
        others = [row.name for row in rows if not row.line and not board.is_own(row.name)]
        best, above = (best_of(names, board, protocol) for names in (board.papers, others))
        compared += [(board.own, best, " (the best of the papers')")] if best else []
        compared += [(board.own, above, " (the best of all others)")] if above and above != best else []
    for name, other, note in compared:
        final, base = (board.finals(one, protocol) for one in (name, other))
        pairs = [paired(values(final, heading), values(base, heading)) for heading in ("probe %", "kNN %")]
        if pairs[0][0]:
            titles = board.rows[name].title, board.rows[other].title + note
            yield [*titles, *(verdict(*one) for one in pairs), str(pairs[0][0])]


def best_of(names: Sequence[str], board: Board, protocol: str) -> str | None:
    """Name of the row with the highest mean probe accuracy; None without results."""
    found = {name: [*values(board.finals(name, protocol), "probe %").values()] for name in names}
    means = {name: statistics.fmean(numbers) for name, numbers in found.items() if numbers}
    return max(means, key=lambda name: means[name], default=None)


def protocol_lines(board: Board, protocol: str) -> list[str]:
    """Lines with the results of a protocol; empty if there are none."""
    rows, lines = (list(main_rows(board, protocol, line)) for line in (False, True))
    if not rows and not lines:
        return []
    page = [f"### Results: {protocol}", ""]
    if protocol == "short":
        page += ["![Probe accuracy of every row and seed](board.svg)", ""]
    page += [*markdown(HEADER, rows), "Baselines:", ""]
    page += markdown(HEADER, [untrained(board, protocol), *lines])
    if against := list(differences(board, protocol)):
        page += ["Paired differences in points, with their 95 % confidence intervals:", ""]
        page += markdown(["row", "minus", "probe", "kNN", "seeds"], against)
    return page


def tuning_lines(board: Board) -> list[str]:
    """Lines with all finished tuning runs, one for each temperature of a row, with the choice in bold."""
    table: dict[tuple[str, str], dict[str, str]] = {}
    for row in filter(None, map(board.resolve, board.rows.values())):
        chosen = board.choice(row)
        for entry in () if row.choice_of else board.tunings(row):
            if record := board.record(entry.name):
                score = "failed" if "failed" in record else f"{100 * board.score(entry):.2f}"
                rate, tau = point_cells(entry.point)
                table.setdefault((row.title, tau), {})[rate] = f"**{score}**" if entry == chosen else score
    rates = [str(rate) for rate in board.tuning["rates"]]
    rows = [[*head, *(scores.get(rate, "") for rate in rates)] for head, scores in table.items()]
    lines = [
        "### Tuning runs",
        "",
        "Probe accuracy in % on the validation images, by learning rate; the choice in bold.",
        "",
    ]
    return [*lines, *markdown(["row", "τ", *rates], rows)] if rows else []


def made(board: Board) -> str:
    """Lines of Markdown that are generated from the records."""
    parts = [line for protocol in board.protocols for line in protocol_lines(board, protocol)]
    return "\n".join([*parts, *tuning_lines(board)]).rstrip() or "No run is finished yet."


def picture(board: Board, protocol: str = "short") -> str:
    """Probe accuracy as SVG, with a dot for each seed and a bar at the mean, in the board's order."""
    found = {row.title: values(board.finals(row.name, protocol), "probe %") for row in board.rows.values()}
    dots = {title: [*numbers.values()] for title, numbers in found.items() if numbers}
    if not dots:
        return ""
    everything = [number for numbers in dots.values() for number in numbers]
    low, high = 5 * math.floor(min(everything) / 5), 5 * math.floor(max(everything) / 5) + 5
    bottom = 20 * len(dots) + 10

    def x(number: float) -> str:
        return f"{200 + 480 * (number - low) / (high - low):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="720" height="{bottom + 40}" '
        'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
    ]
    for tick in range(low, high + 1, 5):
        parts.append(f'<path d="M{x(tick)} 10V{bottom}" stroke="#ddd"/>')
        parts.append(f'<text x="{x(tick)}" y="{bottom + 15}" text-anchor="middle">{tick}</text>')
    parts.append(f'<text x="440" y="{bottom + 32}" text-anchor="middle">probe accuracy, %</text>')
    for i, (title, numbers) in enumerate(dots.items()):
        y, mean = 20 * i + 20, x(statistics.fmean(numbers))
        parts.append(f'<text x="190" y="{y + 4}" text-anchor="end">{escape(title)}</text>')
        parts.append(f'<path d="M{mean} {y - 7}v14" stroke="#c40" stroke-width="2"/>')
        parts += [f'<circle cx="{x(n)}" cy="{y}" r="3" fill="#06c" fill-opacity="0.6"/>' for n in numbers]
    return "\n".join([*parts, "</svg>", ""])


def ablation(board: Board, protocol: str = "short") -> str:
    """Table of the ablation: each row beside the one that lacks its change."""
    rows = []
    for name, other in board.ablation:
        row, base = board.rows[name], board.rows[other]
        probe, without = (values(board.finals(one, protocol), "probe %") for one in (name, other))
        if probe and (chosen := board.choice(row)):
            rate, _ = point_cells(chosen.point)
            difference = paired(probe, without)
            shown = mean_std([*probe.values()], 2)
            rows.append([row.title, rate, shown, base.title, verdict(*difference), str(difference[0])])
    return "\n".join(markdown(["row", "rate", "probe %", "minus", "difference", "seeds"], rows)).rstrip()


def write(board: Board) -> None:
    """Update the page, the picture, and the ablation on our own method's page."""
    for page, text in ((PAGE, made(board)), (OWN_PAGE, ablation(board))):
        page.write_text(filled(page.read_text("utf-8"), text, BEGIN, END), "utf-8")
    if drawn := picture(board):
        PAGE.with_suffix(".svg").write_text(drawn, "utf-8")
