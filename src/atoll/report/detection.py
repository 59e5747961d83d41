"""Average precision of detectors that start from a run's encoder, on the page and in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from atoll.report.groups import Group
from atoll.report.html import Html, folded, join, table, tag
from atoll.report.numbers import mean_std
from atoll.report.results_tables import constants_words, method_label

# Heading, kind and number of COCO's that each column shows, in %.
COLUMNS = (
    ("AP, boxes %", "bbox", "AP"),
    ("AP50, boxes %", "bbox", "AP50"),
    ("AP75, boxes %", "bbox", "AP75"),
    ("AP, masks %", "segm", "AP"),
    ("AP50, masks %", "segm", "AP50"),
)
HEADINGS = tuple(heading for heading, *_ in COLUMNS)
SAME = ("seed", "device", "threads", "save_every")  # options that may differ within a row
WORDS = (
    "Each detector starts from the encoder or, from scratch, from new weights of its architecture, and is trained "
    "whole. AP is the mean over intersections over union of 0.5 to 0.95, as COCO defines it."
)


def precision_cells(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Format the columns of records of one setting: mean ± standard deviation over seeds."""
    return [
        mean_std(
            [
                100 * record[kind][number]
                for record in records
                if record.get(kind, {}).get(number) is not None
            ],
            1,
        )
        for _, kind, number in COLUMNS
    ]


def detection_table(groups: Sequence[Group]) -> Html:
    """Table of detection, and the constants of its protocol; empty if nothing was detected."""
    rows: dict[str, tuple[int, list[Mapping[str, Any]]]] = {}
    for i, group in enumerate(groups):
        for run in group.runs:
            for record in run.detection:
                key = repr((i, record["data"], record["start"], _constants(record)))
                rows.setdefault(key, (i, []))[1].append(record)
    if not rows:
        return Html("")
    body = []
    for i, records in rows.values():
        seeds = f"{len(records)} seeds" if len(records) > 1 else f"seed {records[0]['seed']}"
        label = method_label(i, groups[i].label, seeds)
        body.append([label, records[0]["data"], _start(records[0]), *precision_cells(records)])
    constants = dict.fromkeys(constants_words(_constants(records[0])) for _, records in rows.values())
    return join(
        [
            table("Object detection", ["method", "data", "start", *HEADINGS], body),
            tag("p", WORDS, class_="muted"),
            folded("Constants of detection", *(tag("p", words) for words in constants)),
        ]
    )


def _constants(record: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record["options"].items() if key not in SAME}


def _start(record: Mapping[str, Any]) -> str:
    return "from scratch" if record["start"] == "scratch" else "this encoder"
