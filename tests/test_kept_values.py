"""What every version must keep: seeds, splits and fingerprints, by which runs of earlier versions go on.

Each value was computed when it was added here. If a change alters one, runs of earlier versions are refused when
they are resumed, or go on with other random numbers, and published results cannot be repeated.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import pytest
import torch

from atoll.core.rng import derive_seed, numpy_stream, stream
from atoll.data.cache import open_records
from atoll.data.decode import Decoding
from atoll.data.objects import give_data
from atoll.data.options import PartitionOptions
from atoll.data.partition.make import make_partition
from atoll.data.records import FileRecords, SelectedRecords
from atoll.data.views.draws import draw_views
from atoll.data.views.options import PRESETS
from atoll.engines.federation import Federation
from atoll.engines.server import Server
from tests.harness import tiny

LABELS = torch.arange(200) % 10


def short_hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:8]


def test_streams():
    assert derive_seed(0, "views", 3, 7) == 6330871622747902603
    assert torch.randperm(8, generator=stream(0, "order", 1, 2)).tolist() == [4, 6, 3, 1, 2, 7, 0, 5]
    assert numpy_stream(0, "partition").permutation(8).tolist() == [7, 5, 2, 3, 0, 1, 6, 4]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"kind": "iid"}, "2c75733d"),
        ({"kind": "quantity"}, "770cbaff"),
        ({"kind": "dirichlet", "variant": "moon", "min_size": 1}, "bd748869"),
        ({"kind": "dirichlet", "variant": "fedu2"}, "d3f47657"),
        ({"kind": "dirichlet", "variant": "dec-ssl"}, "907ccff3"),
        ({"kind": "dirichlet", "variant": "l-dawa"}, "324988a5"),
        ({"kind": "dirichlet", "variant": "l-dawa", "balanced": True}, "10852149"),
        ({"kind": "skew", "beta": 0.3}, "265daa47"),
        ({"kind": "shards"}, "9bfceba1"),
        ({"kind": "shards", "classes_per_client": 4}, "534817a5"),
        ({"kind": "single-class", "clients": 10}, "dba26bea"),
    ],
    ids=str,
)
def test_partitions(options, expected):
    chosen = PartitionOptions(**{"clients": 5, "alpha": 0.5, **options})
    partition = make_partition(chosen, LABELS, {}, len(LABELS), seed=3)
    assert short_hash([client.tolist() for client in partition.clients]) == expected


def test_views():
    draw = draw_views(PRESETS["simclr"], [3], (32, 32), [stream(0, "views", 1, 2, "view1")])
    boxes = torch.stack([draw.top, draw.left, draw.height, draw.width])
    assert boxes.tolist() == [[3, 11, 6], [4, 20, 7], [25, 10, 24], [23, 11, 18]]
    assert draw.order.tolist() == [[3, 1, 2, 0], [2, 0, 3, 1], [3, 1, 0, 2]]
    assert draw.factors[0].tolist() == pytest.approx([1.149911, 1.302067, 0.823066, -0.014468], abs=1e-5)


def test_a_federation():
    federation = Federation(tiny("train.participation=0.5", "partition.clients=6"))
    weights = federation.initial_weights()
    server = Server(federation.recipe, federation.setting, weights)
    assert [server.cohort(round) for round in (1, 2, 3)] == [[5, 4, 0], [3, 2, 4], [4, 5, 1]]
    rows = [batch.indices.tolist() for batch in federation.client_data(2).batches(1, 2, ["view1"])]
    assert short_hash(rows) == "783dd159"
    for name, first in (
        ("encoder.conv1.weight", [0.177448, 0.151285, -0.410064]),
        ("projector.0.weight", [-0.091605, -0.166076, -0.083893]),
    ):
        assert weights[name].flatten()[:3].tolist() == pytest.approx(first, abs=1e-5)


def test_fingerprints(tmp_path, monkeypatch):
    monkeypatch.setenv("ATOLL_CACHE", str(tmp_path / "cache"))
    for name, content in (("a.png", b"one"), ("b.png", b"two"), ("c.png", b"three")):
        (tmp_path / name).write_bytes(content)
    files = FileRecords(tmp_path, ("a.png", "b.png", "c.png"))
    chosen = SelectedRecords(files, np.array([2, 0]))
    found = [open_records(records, Decoding(8, 1), 2**30).fingerprint for records in (files, chosen)]
    assert found == ["39ea69376eaeae5e489cf0dd3729e16e", "81b02c0e6acb133ae73dd925132f9d31"]
    assert give_data((np.arange(128, dtype=np.uint8).reshape(2, 8, 8), [0, 1])) == "object:tuple#868a42f4ba1d"
    assert Federation(tiny()).splits.train.fingerprint == "cdb7fd35b3da4f924eebb5a506442219"
