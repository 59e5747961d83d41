"""The table of docs/detection.md, from the detectors that benchmarks/detection.sh trained.

python benchmarks/detection.py collect runs/detection  # their measurements to results/detection.json
python benchmarks/detection.py table                   # docs/detection.md
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atoll.report.paired import paired, with_interval
from pages import filled, markdown, mean_std

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "detection.json"
PAGE = HERE.parent / "docs" / "detection.md"
BEGIN, END = (
    "<!-- made by benchmarks/detection.py: begin -->",
    "<!-- made by benchmarks/detection.py: end -->",
)
STARTS = {"fed_simclr": "FedSimCLR", "dec_sl": "supervised federated (Dec-SL)", "scratch": "scratch"}
MEASURES = {"AP": "AP", "AP50": "AP50", "AP75": "AP75"}


def collect(runs: Path) -> dict[str, dict[str, Any]]:
    """Read the detectors' measurements, by start and seed."""
    found = {}
    for path in sorted(runs.glob("*-seed*/detection/bccd/*-seed*.json")):
        one = json.loads(path.read_text("utf-8"))
        start = "scratch" if one["start"] == "scratch" else path.parents[2].name.rpartition("-seed")[0]
        kept = ("seed", "options", "images", "steps", "bbox", "cpu_seconds", "version")
        found[f"{start}-seed{one['seed']}"] = {key: one[key] for key in kept}
    return found


def by_seed(records: Mapping[str, Mapping[str, Any]], start: str, measure: str) -> dict[int, float]:
    """A start's precision in %, by seed."""
    return {
        one["seed"]: 100 * one["bbox"][measure]
        for name, one in records.items()
        if name.startswith(f"{start}-seed")
    }


def made(records: Mapping[str, Mapping[str, Any]]) -> str:
    """The generated part of the page."""
    rows = []
    for start, title in STARTS.items():
        numbers = {name: by_seed(records, start, name) for name in MEASURES}
        if not numbers["AP"]:
            continue
        base = by_seed(records, "scratch", "AP")
        common, mean, half = paired(numbers["AP"], base)
        difference = with_interval(mean, half) if common and start != "scratch" else "–"
        cells = [mean_std(list(found.values()), 1) for found in numbers.values()]
        rows.append([title, *cells, difference, str(len(numbers["AP"]))])
    return "\n".join(markdown(("start", *MEASURES, "AP less scratch", "seeds"), rows)).rstrip()


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("collect", "table"))
    parser.add_argument("runs", nargs="?", type=Path, default=Path("runs/detection"))
    args = parser.parse_args()
    if args.command == "collect":
        lines = (f"{json.dumps(name)}: {json.dumps(one)}" for name, one in collect(args.runs).items())
        RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
    records = json.loads(RESULTS.read_text("utf-8"))
    PAGE.write_text(filled(PAGE.read_text("utf-8"), made(records), BEGIN, END), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
