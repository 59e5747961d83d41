"""The table of docs/solar-cells.md: two solar-cell factories, from a pretrained encoder to a few labels.

    python benchmarks/solar_cells.py run --data FOLDER   # the missing runs; SIGTERM stops after a round
    python benchmarks/solar_cells.py table               # docs/solar-cells.md

examples/solar_cells/export.py writes FOLDER. The rows are in solar_cells.toml; each run has one record in
``results/solar_cells.json``. A run with a record is not repeated, and an interrupted one continues.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import atoll
import board
from atoll.commands.evaluate import evaluate_run
from atoll.report.paired import paired, with_interval
from board_rows import HERE, Entry, Record
from pages import filled, markdown, mean_std
from runs import Runs, command

RESULTS = HERE / "results" / "solar_cells.json"
PAGE = HERE.parent / "docs" / "solar-cells.md"
RECIPE = HERE.parent / "examples" / "solar_cells" / "recipe.toml"
BEGIN, END = (
    "<!-- made by benchmarks/solar_cells.py: begin -->",
    "<!-- made by benchmarks/solar_cells.py: end -->",
)
MEASURES = {  # of an encoder: heading → key of the evaluation
    "kNN": "knn/accuracy",
    **{f"probe, {count}": f"probe-ssd-{count}-labels/accuracy" for count in (50, 100, 500)},
    "probe, all": "probe/accuracy",
    **{f"fine-tuned, {count}": f"finetune-{count}-labels/accuracy" for count in (50, 100, 500)},
}
SUPERVISED = {  # of classifiers
    "all test cells": "classifier/accuracy",
    "each factory's own": "clients-classifier/weighted_accuracy",
}


class Study(Runs):
    """The runs and their records, which are in one file.

    Args:
        results: The file of the records.
        table: Content of solar_cells.toml; None to read the file.

    Attributes:
        rows: The rows by name, each with its settings: encoders, then the supervised baselines.
    """

    def __init__(self, results: Path = RESULTS, table: Mapping[str, Any] | None = None) -> None:
        self.table = table or tomllib.loads((HERE / "solar_cells.toml").read_text("utf-8"))
        lines = self.table["supervised"]
        self.rows: dict[str, dict[str, Any]] = self.table["rows"] | {
            f"{kind}-{labels}": {
                "pretrained": True,
                "settings": [*lines["settings"], *of_labels, *of_kind],
            }
            for labels, of_labels in lines["labels"].items()
            for kind, of_kind in lines["kinds"].items()
        }
        runs = {
            name: {"recipe": str(RECIPE), "settings": row.get("settings", [])}
            for name, row in self.rows.items()
        }
        super().__init__(results, runs, self.table["seeds"])

    def saved(self) -> dict[str, Record]:
        """All records by the name of their run."""
        return json.loads(self.results.read_text("utf-8")) if self.results.is_file() else {}

    def record(self, name: str) -> Record | None:
        """Load a run's record; None if it does not exist."""
        return self.saved().get(name)

    def row(self, entry: Entry) -> dict[str, Any]:
        """The row of a run."""
        return self.rows[entry.name.rpartition("-seed")[0]]

    def save(self, record: Record) -> None:
        """Add a record to the file, which is replaced as a whole."""
        part = self.results.with_suffix(".part")
        records = {**self.saved(), record["entry"]: record}
        lines = (f"{json.dumps(name)}: {json.dumps(one)}" for name, one in sorted(records.items()))
        part.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
        part.replace(self.results)

    def make_one(self, entry: Entry, work: Path, callback: board.StopAfterRound) -> None:
        """Make one run and save its record."""
        print(f"{entry.name} …", flush=True)
        weights = Path(os.environ.get("ATOLL_DATA", ".")).absolute() / self.table["weights"]
        settings = [f"model.weights={weights}"] if self.row(entry).get("pretrained") else []
        record = make(self, entry, work, settings, callback)
        self.save(record)
        print(f"{entry.name}: {record['minutes']} minutes of training", flush=True)

    def measured(self, row: str, key: str) -> dict[int, float]:
        """A row's accuracies in %, by seed."""
        found = {seed: record["evaluation"] for seed, record in self.records(row).items()}
        return {seed: 100 * one[key] for seed, one in found.items() if key in one}


def make(
    study: Study,
    entry: Entry,
    work: Path,
    settings: Sequence[str] = (),
    callback: board.StopAfterRound | None = None,
) -> Record:
    """Train an entry, or continue, and measure its encoder; each part that is finished is not repeated."""
    record = board.run(entry, work, settings, callback)
    rounds = record.pop("rounds")
    run = atoll.Run(work / entry.name)
    for protocol in study.table["fine_tunings"] if study.row(entry).get("fine_tune") else ():
        found = run.read_json(f"evaluation-{protocol}.json") or evaluate_run(run, protocol)
        record["evaluation"] |= {key: value for key, value in found.items() if key.startswith(protocol)}
        if callback and callback.stop:
            raise board.StopAsked
    record["evaluation"].pop("geometry/singular_values", None)  # 1,280 numbers, which no page shows
    megabytes = sum(line.get("bytes_up", 0) + line.get("bytes_down", 0) for line in rounds) / 1e6
    return {**record, "megabytes": round(megabytes, 1), "minutes": round(minutes(run.metrics), 1)}


def minutes(lines: Sequence[Mapping[str, Any]]) -> float:
    """Minutes of training: the median round for each, so that a pause of the machine within one does not count."""
    seconds = [line["seconds"] for line in lines if "seconds" in line]
    return float(len(seconds) * statistics.median(seconds or [0.0]) / 60)


def cells(study: Study, row: str, measures: Mapping[str, str]) -> list[str]:
    """A row's means over the seeds."""
    return [mean_std(list(study.measured(row, key).values()), 1) for key in measures.values()]


def differences(study: Study) -> list[str]:
    """The encoders' accuracies less those of the first one, paired by seed, with their 95 % intervals."""
    first, *others = (name for name in study.table["rows"] if study.records(name))
    rows = []
    for heading, key in MEASURES.items():
        base = study.measured(first, key)
        found = [paired(study.measured(name, key), base) for name in others]
        rows.append([heading, *(with_interval(mean, half) if n else "–" for n, mean, half in found)])
    titles = [study.table["rows"][name]["title"] for name in (first, *others)]
    said = f"Each encoder less the first ({titles[0]}), paired by seed, with the 95 % confidence interval."
    return ["### Differences", "", said, "", *markdown(["measure", *titles[1:]], rows)]


def made(study: Study) -> str:
    """The generated part of the page."""
    encoders = [
        [one["title"], *cells(study, name, MEASURES), str(len(study.records(name)))]
        for name, one in study.table["rows"].items()
        if study.records(name)
    ]
    lines = [
        [
            f"{labels} labels",
            kind,
            *cells(study, f"{kind}-{labels}", SUPERVISED),
            str(len(study.records(f"{kind}-{labels}"))),
        ]
        for labels in study.table["supervised"]["labels"]
        for kind in study.table["supervised"]["kinds"]
        if study.records(f"{kind}-{labels}")
    ]
    costs = [
        [row["title"], *(mean_std([one[key] for one in found], 1) for key in ("megabytes", "minutes"))]
        for name, row in study.table["rows"].items()
        if (found := list(study.records(name).values()))
    ]
    parts = ["No run is finished yet.", ""] if not study.saved() else []
    if encoders:
        parts += ["### Encoders", "", *markdown(["encoder", *MEASURES, "seeds"], encoders)]
    if len(encoders) > 1:
        parts += differences(study)
    if lines:
        parts += [
            "### Supervised baselines",
            "",
            *markdown(["labels", "trained", *SUPERVISED, "seeds"], lines),
        ]
    if costs:
        parts += ["### Cost", "", *markdown(["encoder", "MB up and down", "minutes of training"], costs)]
    return "\n".join(parts).rstrip()


def write(study: Study, page: Path = PAGE) -> None:
    """Update the page."""
    page.write_text(filled(page.read_text("utf-8"), made(study), BEGIN, END), "utf-8")


if __name__ == "__main__":
    sys.exit(command(__doc__, Path("runs/solar-cells"), Study, write))
