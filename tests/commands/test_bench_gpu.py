"""``atoll bench gpu``: what a call keeps of earlier ones, with parts that measure nothing."""

from __future__ import annotations

import json

import pytest

from atoll.commands import bench_gpu as program
from atoll.commands.bench_gpu import Part, bench_gpu
from atoll.core.errors import RunError


def test_a_call_goes_on_where_the_last_one_stopped(tmp_path, monkeypatch):
    """It stops at a limit of time, after a failed part, and when the GPU can be used no more."""
    measured = []

    def part(bench):
        values = {name: (lambda name=name: measured.append(name) or {"value": name}) for name in "abc"}
        for name, found in bench.new(values):
            yield name, {**found, "fatal": True, "error": "broken"} if name == "b" else found

    monkeypatch.setattr(program, "PARTS", {"one": Part(part, -1)})  # no time: one value in each call
    out = tmp_path / "bench.json"
    assert list(bench_gpu(out, "cpu", "test")["parts"]["one"]["found"]) == ["a"]
    with pytest.raises(RunError, match="one, b: broken; call again"):
        bench_gpu(out, "cpu", "test")
    assert not bench_gpu(out, "cpu", "test")["parts"]["one"]["finished"]
    assert bench_gpu(out, "cpu", "test")["parts"]["one"]["finished"]
    assert measured == ["a", "b", "c"]
    assert list(json.loads(out.read_text())["parts"]["one"]["found"]) == ["a", "b", "c"]
    assert bench_gpu(out, "cpu", "test")["parts"]["one"]["finished"]
    assert measured == ["a", "b", "c"]


def test_the_record_of_another_device_is_kept_aside(tmp_path, monkeypatch):
    monkeypatch.setattr(program, "PARTS", {})
    out = tmp_path / "bench.json"
    for number, device in enumerate(("another", "a third")):
        out.write_text(json.dumps({"about": {"device": device}, "parts": {}}))
        bench_gpu(out, "cpu", "test")
        assert json.loads((tmp_path / f"bench-{number + 1}.json").read_text())["about"]["device"] == device
    out.write_text("damaged")
    bench_gpu(out, "cpu", "test")
    assert len(list(tmp_path.iterdir())) == 3  # nothing is worth keeping of a damaged record
