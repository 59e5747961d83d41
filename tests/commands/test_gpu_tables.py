"""The projected durations of the papers' tables."""

from __future__ import annotations

import torch

from atoll.commands import gpu_tables
from atoll.commands.gpu_parts import Bench
from atoll.commands.gpu_scale import SCALES
from atoll.commands.gpu_tables import tables
from atoll.papers.tables import table_names


def test_every_row_of_every_table_has_a_projected_time(monkeypatch):
    monkeypatch.setattr(gpu_tables, "_speed", lambda *_: {"samples_a_second": 1000.0})
    found = dict(tables(Bench(torch.device("cpu"), SCALES["full"])))
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
