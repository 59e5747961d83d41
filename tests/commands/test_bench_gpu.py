"""``atoll bench gpu``: what a call keeps of earlier ones, with parts that measure nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

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


KILLED = """
import os, signal, sys
from pathlib import Path
from atoll.commands import bench_gpu as program

def part(bench):
    def measure(name):
        if name == "b":
            os.kill(os.getpid(), getattr(signal, sys.argv[2]))
        return {"value": name}
    yield from bench.new({name: lambda name=name: measure(name) for name in "abc"})

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's jobs in the background ignore it
program.PARTS = {"one": program.Part(part, 60)}
program.bench_gpu(Path(sys.argv[1]), "cpu", "test")
"""


@pytest.mark.slow
def test_a_value_that_ends_its_process_is_not_tried_again(tmp_path):
    """Else a crash would repeat for ever, and no later value would be measured; an interruption is no crash."""
    out = tmp_path / "bench.json"
    for name, code, found in (("SIGINT", -2, "a"), ("SIGKILL", -9, "a"), ("SIGKILL", 0, "abc")):
        program = [sys.executable, "-c", KILLED, str(out), name]
        assert subprocess.run(program, check=False, stderr=subprocess.DEVNULL).returncode == code
        part = json.loads(out.read_text())["parts"]["one"]
        assert "".join(sorted(part["found"])) == found
        assert ("now measured" in part) == (code == -9)
    assert part["finished"]
    assert part["found"]["b"] == {"ok": False, "error": "the process that measured it crashed or was killed"}


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


def test_chosen_parts_are_measured_in_their_order(tmp_path, monkeypatch):
    def part(name):
        return Part(lambda bench: bench.new({name: lambda: {"value": name}}), 60)

    monkeypatch.setattr(program, "PARTS", {name: part(name) for name in "abc"})
    said = []
    record = bench_gpu(tmp_path / "bench.json", "cpu", "test", said.append, ["c", "a"])
    assert list(record["parts"]) == ["c", "a"]
    assert [line[0] for line in said] == ["c", "a"]
    record = bench_gpu(tmp_path / "bench.json", "cpu", "test")
    assert sorted(record["parts"]) == ["a", "b", "c"]


def test_the_gpu_plan_names_each_part_once():
    plan = tomllib.loads((Path(__file__).parents[2] / "benchmarks" / "gpu" / "plan.toml").read_text())
    assert sorted(plan["parts"]) == sorted(program.PARTS)
