"""Parts of ``atoll bench gpu``, on the CPU."""

from __future__ import annotations

from dataclasses import replace

import torch

from atoll.commands import gpu_parts
from atoll.commands.gpu_parts import SCALES, Bench, correctness
from atoll.methods.registry import METHODS
from atoll.papers.tables import table_names


def test_every_method_is_checked_at_full_scale():
    """With fewer images; the list of methods and the settings that some need are the full scale's."""
    full = SCALES["full"]
    scale = replace(full, digits=(*full.digits, "data.limit=160", "train.batch_size=32"))
    found = dict(correctness(Bench(torch.device("cpu"), scale)))
    assert found.keys() == METHODS.keys()
    assert {name: value.get("error") for name, value in found.items() if not value["ok"]} == {}


def test_every_row_of_every_table_has_a_projected_time(monkeypatch):
    monkeypatch.setattr(gpu_parts, "_speed", lambda *_: 1000.0)
    found = dict(gpu_parts.tables(Bench(torch.device("cpu"), SCALES["full"])))
    assert found.keys() == set(table_names())
    rows = {(table, name): row for table, part in found.items() for name, row in part["rows"].items()}
    assert {key: row["error"] for key, row in rows.items() if "error" in row} == {}
    assert all(
        row.keys() in ({"trained_as"}, {"samples_a_second", "samples", "hours"}) for row in rows.values()
    )
    # Dec-SSL pretrains for 200 rounds of an epoch: on ImageNet-100, and on around 80,000 images of packages.
    assert rows["dec-ssl-1-left", "ssl"]["samples"] == 200 * 126_689
    assert rows["dec-ssl-1-right", "ssl-all"]["samples"] == 200 * 80_000
    # Its shares of labels are the fine-tuning's.
    assert rows["dec-ssl-1-right", "ssl-tenth"] == {"trained_as": "ssl-all"}
    assert rows["dec-ssl-1-left", "ssl"]["hours"] == 200 * 126_689 / 1000 / 3600
