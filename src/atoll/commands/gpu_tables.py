"""The part of ``atoll bench gpu`` that projects how long each paper's table takes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from atoll.commands.gpu_parts import PRECISIONS, Bench, Found, attempt
from atoll.commands.gpu_workloads import synthetic_workload
from atoll.core.config import describe
from atoll.papers.images import PUBLIC_SETS
from atoll.papers.reproduction import find_table
from atoll.recipe.recipe import Recipe, make_recipe

PRIVATE_IMAGES = {"amazon-packages": 80_000}  # "around", Dec-SSL, Section 3.1


def tables(bench: Bench) -> Found:
    """Project the duration of each paper's table from the samples of its rows and the speed of their steps.

    Views are included, evaluation is not. Rows with the same training step are timed once, and rows with the same
    training are counted once.
    """
    speeds: dict[str, dict[str, Any]] = {}
    yield from bench.new({table: partial(_table, bench, table, speeds) for table in bench.scale.tables})


def _table(bench: Bench, table: str, speeds: dict[str, dict[str, Any]]) -> dict[str, Any]:
    rows: dict[str, dict[str, Any]] = {}
    job = find_table(table)
    for row in job.rows:
        recipe, first = row.recipe, job.trained_as[row.name]
        if first != row.name:
            rows[row.name] = {"trained_as": first}
            continue
        key = json.dumps(_training_key(recipe), sort_keys=True)
        if key not in speeds:
            speeds[key] = attempt(partial(_speed, bench, recipe))
        speed = speeds[key]
        if "fatal" in speed:
            return speed
        rows[row.name] = speed if "error" in speed else attempt(partial(_projected, recipe, speed))
    hours = [row["hours"] for row in rows.values() if "hours" in row]
    return {"hours": sum(hours), "rows_counted": len(hours), "rows": rows}


def _training_key(recipe: Recipe) -> dict[str, Any]:
    table = describe(recipe)
    sections = {key: table[key] for key in ("views", "model", "method", "options")}
    return {
        **sections,
        "batch": recipe.train.batch_size,
        "data": [recipe.data.image_size, recipe.data.channels],
    }


def _speed(bench: Bench, recipe: Recipe) -> dict[str, Any]:
    settings = (*PRECISIONS["bf16"][1], *bench.scale.settings)
    work = synthetic_workload(make_recipe(describe(recipe)), settings, bench.device)
    return {"samples_a_second": work.batch_size / bench.seconds(work.step_with_views, work.in_a_pass)}


def _projected(recipe: Recipe, speed: dict[str, Any]) -> dict[str, Any]:
    name = Path(recipe.data.path or "").name
    images = PRIVATE_IMAGES[name] if name in PRIVATE_IMAGES else PUBLIC_SETS[name].train
    train = recipe.train
    share = 1.0 if recipe.partition.kind == "centralised" else train.participation
    seen = images * share * train.rounds * train.epochs
    return {**speed, "samples": seen, "hours": seen / speed["samples_a_second"] / 3600}
