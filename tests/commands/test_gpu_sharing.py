"""NVIDIA's Multi-Process Service around worker processes, with a stand-in for its control program."""

import os
import stat
from dataclasses import replace

import pytest
import torch

from atoll.commands import gpu_sharing
from atoll.commands.gpu_parts import Bench
from atoll.commands.gpu_scale import SCALES
from atoll.commands.gpu_sharing import CONTROL, mps, sharing
from atoll.core.errors import UserError


@pytest.fixture
def control(tmp_path, monkeypatch):
    """A control program that notes its arguments, its pipe's folder and its input; its exit code can be set."""

    def install(code=0, daemon=":"):
        program = tmp_path / CONTROL
        program.write_text(
            f'#!/bin/sh\necho "args:$*" >> {tmp_path}/log\necho "pipe:$CUDA_MPS_PIPE_DIRECTORY" >> {tmp_path}/log\n'
            f'if [ "$1" = -d ]; then {daemon}; else cat >> {tmp_path}/log; fi\nexit {code}\n'
        )
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        return tmp_path / "log"

    return install


def test_it_runs_for_the_processes_within_the_context_and_stops(control):
    log = control()
    before = dict(os.environ)
    with mps():
        folder = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
        assert log.read_text().splitlines() == ["args:-d", f"pipe:{folder}"]
    assert log.read_text().splitlines()[2:] == ["args:", f"pipe:{folder}", "quit"]
    assert dict(os.environ) == before


def test_a_service_that_writes_on_while_it_stops_costs_no_value(control):
    write = 'for i in 1 2 3 4 5 6 7 8 9; do echo "$n" > "$CUDA_MPS_LOG_DIRECTORY/$i.log"; done'
    control(daemon=f"(n=0; while [ $n -lt 3000 ]; do n=$((n + 1)); {write}; done) > {os.devnull} 2>&1 & true")
    for _ in range(3):
        with mps():
            pass


@pytest.fixture
def gpu(monkeypatch):
    """A bench of a GPU that is not there, whose rounds take as many seconds as the way has letters."""
    monkeypatch.setattr(gpu_sharing, "_seconds", lambda bench, way: {"seconds": float(len(way))})
    return Bench(torch.device("cuda"), SCALES["test"])


def test_each_way_has_a_time(gpu, control):
    control()
    assert dict(sharing(gpu)) == {
        "processes: 1": {"seconds": 16.0},
        "streams: 2": {"seconds": 16.0},
        "stacked: 2": {"seconds": 14.0},
        "processes: 2": {"seconds": 16.0},
        "processes with MPS: 2": {"seconds": 16.0},
    }


def test_a_service_that_does_not_start_is_an_error_of_its_own_line(gpu, control, monkeypatch):
    control(code=1)
    assert "exit status 1" in dict(sharing(gpu))["processes with MPS: 2"]["error"]
    monkeypatch.setenv("PATH", "")
    assert dict(sharing(gpu))["processes with MPS: 2"]["error"] == f"UserError: {CONTROL} is not installed"
    with pytest.raises(UserError, match="is not installed"), mps():
        pass


def test_a_service_that_failed_is_not_started_again(gpu, control):
    """If it hung, the bench was killed after minutes, and its next start has that value as failed."""
    log = control()
    killed = {"processes with MPS: 10": {"ok": False, "error": "the process that measured it was killed"}}
    bench = replace(gpu, scale=replace(gpu.scale, shared=(10, 5)), known=killed)
    assert {"processes: 5", "streams: 5"} < dict(sharing(bench)).keys()
    assert not log.exists()
    done = replace(bench, known={"processes with MPS: 10": {"seconds": 1.0}})
    assert "processes with MPS: 5" in dict(sharing(done))
    control(code=1)
    mine = [name for name in dict(sharing(replace(bench, known={}))) if "MPS" in name]
    assert mine == ["processes with MPS: 10"]
