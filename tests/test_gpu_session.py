"""`benchmarks/gpu.sh`, from end to end, at tiny size on a CPU: interrupted once, and resumed from what it left."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
import tomllib
from contextlib import contextmanager
from pathlib import Path

import pytest
import tomli_w
import torch

from atoll.core.checkpoints import save_checkpoint
from atoll.core.config import over, read_settings
from atoll.core.run_folder import Run
from tests.harness import TINY

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu.sh"
TABLE = """
title = "Two methods on digits"
recipe = "tiny.toml"
columns = ["kNN %"]
rows = [[["long", "short"]]]
[measures]
"kNN %" = { of = "knn/accuracy", times = 100 }
[choices.short]
title = "FedSimSiam, one round"
changes.train.rounds = 1
changes.method.name = "fed_simsiam"
[choices.long]
title = "FedSimCLR, many rounds"
changes.train.rounds = 400
changes.method.name = "fed_simclr"
"""
PLAN = '[[rows]]\ntable = "{table}"\nrows = ["*"]\nseeds = [3]\ntogether = 2\n'


def start(folder, work, *arguments):
    environment = {
        **os.environ, "ATOLL_GPU_SCALE": "test", "ATOLL_GPU_DEVICE": "cpu", "ATOLL_GPU_WORK": str(work),
        "ATOLL_GPU_PLAN": str(folder / "plan.toml"), "ATOLL_GPU_SECONDS": "3000", "PYTHON": sys.executable,
        "PYTHONPATH": "", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = ["bash", str(SCRIPT), *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=folder)


def load_program():
    spec = importlib.util.spec_from_file_location("gpu_session", SCRIPT.parent / "gpu" / "session.py")
    program = importlib.util.module_from_spec(spec)
    sys.modules["gpu_session"] = program
    spec.loader.exec_module(program)
    return program


def inside(out, member):
    with tarfile.open(out / "results.tar.gz") as archive:
        return archive.extractfile(member).read().decode()


@pytest.mark.slow
def test_it_is_interrupted_and_goes_on_from_what_it_left(tmp_path):

    recipe = over({"base": "digits"}, read_settings(TINY))
    (tmp_path / "tiny.toml").write_text(tomli_w.dumps(recipe))
    (tmp_path / "mine.toml").write_text(TABLE)
    (tmp_path / "plan.toml").write_text(PLAN.format(table=tmp_path / "mine.toml"))
    first, second = tmp_path / "first", tmp_path / "second"

    work = tmp_path / "work"
    process = start(tmp_path, work, first, tmp_path)
    metrics = work / "runs" / "mine" / "long-seed3" / "metrics.jsonl"
    while process.poll() is None and not (metrics.is_file() and len(metrics.read_text().splitlines()) > 4):
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert "interrupted" in said

    (long, *_) = (run for run in json.loads(inside(first, "results.json")) if "long" in run["run"])
    assert not long["finished"]
    assert 0 < long["round"] < 400
    before = inside(first, "runs/mine/long-seed3/metrics.jsonl").splitlines()
    bench = json.loads(inside(first, "bench.json"))
    assert all(part["finished"] for part in bench["parts"].values()), bench
    assert {"fed_simclr", "ssd"} == {k for k, v in bench["parts"]["correctness"]["found"].items() if v["ok"]}
    ways = {"processes: 1", "processes: 2", "streams: 2", "stacked: 2"}
    assert bench["parts"]["sharing"]["found"].keys() == ways
    assert list(first.glob("checkpoints.tar.*"))

    again = start(tmp_path, tmp_path / "elsewhere", second, tmp_path, first)
    said, _ = again.communicate(timeout=1200)
    assert again.returncode == 0, said
    runs = json.loads(inside(second, "results.json"))
    assert [run["finished"] for run in runs] == [True, True]
    assert all(0 < run["results"]["knn/accuracy"] <= 1 for run in runs)
    after = inside(second, "runs/mine/long-seed3/metrics.jsonl").splitlines()
    kept = [json.loads(line)["round"] for line in before].index(long["round"])
    assert after[:kept] == before[:kept]  # with the seconds that each round took, so none was run again
    assert json.loads(inside(second, "bench.json")) == bench
    for out in (first, second):
        sizes = [path.stat().st_size for path in out.iterdir()]
        assert len(sizes) <= 8
        assert max(sizes) < 16 * 2**20


def test_it_says_how_it_is_called():
    called = subprocess.run(["bash", str(SCRIPT)], capture_output=True, text=True, check=False)
    assert called.returncode == 2
    assert "benchmarks/gpu.sh OUT DATA [PREVIOUS]" in called.stderr


def test_missing_images_are_named_before_the_bench(tmp_path):
    """By the script's own plan, whose rows all resolve."""
    called = subprocess.run(
        ["bash", str(SCRIPT), str(tmp_path / "out"), str(tmp_path)],
        env={**os.environ, "PYTHON": sys.executable, "ATOLL_GPU_WORK": str(tmp_path / "work")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert called.returncode == 2
    assert f"there is no file or folder 'cifar10' here or under ATOLL_DATA ({tmp_path})" in called.stderr
    assert not (tmp_path / "out").exists()


def test_missing_packages_are_all_named(tmp_path):
    project = tmp_path / "pyproject.toml"
    wanted = ["numpy>=1", "no-such-one>=2", "nor-this[extra]>=1; python_version > '3'"]
    project.write_text(tomli_w.dumps({"project": {"dependencies": wanted}}))
    program = SCRIPT.parent / "gpu" / "packages.py"
    called = subprocess.run(
        [sys.executable, str(program), str(project)], capture_output=True, text=True, check=False
    )
    assert called.returncode == 2
    assert "lacks no-such-one, nor-this;" in called.stderr


def test_checkpoints_come_back_in_parts_and_what_finds_no_room_begins_again(tmp_path, monkeypatch):
    program = load_program()
    monkeypatch.setattr(program, "FILES", 6)
    monkeypatch.setattr(program, "BYTES", 50_000)
    work, out, fresh = tmp_path / "work", tmp_path / "out", tmp_path / "fresh"
    for name, rounds in (("far", 9), ("near", 2)):  # 160 kB each, and room for 250 kB
        folder = work / "runs" / "table" / f"{name}-seed0"
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "recipe.toml").write_text("[train]\nrounds = 10\n")
        lines = [json.dumps({"round": round}) + "\n" for round in range(rounds + 1)]
        (folder / "metrics.jsonl").write_text("".join(lines))
        for round in (rounds - 1, rounds):
            models = {"w": torch.full((40_000,), 1.0 * round)}
            rest = {"valid": {}, "norms": [], "constants_sent": []}
            save_checkpoint(
                folder / "checkpoints", round, {"round": round, "state": {"models": models}, **rest}
            )
    done = work / "runs" / "table" / "done-seed0"
    done.mkdir()
    (done / "recipe.toml").write_text("[train]\nrounds = 10\n")
    (done / "evaluation.json").write_text('{"knn/accuracy": 0.5, "note": "words"}')
    (done / "encoder.safetensors").write_bytes(b"weights")
    session = program.Session(work, "cpu", "test", time.monotonic() + 60)
    program.pack(session, out)
    sizes = [path.stat().st_size for path in out.iterdir()]
    assert 4 < len(sizes) <= 6
    assert max(sizes) <= 50_000

    fresh.mkdir()
    program.unpack(out, fresh)
    far, near, ended = (Run(fresh / "runs" / "table" / f"{name}-seed0") for name in ("far", "near", "done"))
    assert torch.equal(far.latest()["state"]["models"]["w"], torch.full((40_000,), 9.0))
    assert far.completed_rounds() == 9
    assert not near.folder.exists()
    assert ended.finished
    assert not ended.encoder_path.exists()

    (fresh / "runs" / "table" / "far-seed0" / "metrics.jsonl").write_text("newer\n")
    program.unpack(out, fresh)  # what is here already stays as it is
    assert far.folder.joinpath("metrics.jsonl").read_text() == "newer\n"


@pytest.mark.parametrize(("codes", "starts"), [((1, -9, 0), 3), ((2,), 1), ((1,) * 9, 5)])
def test_the_bench_starts_again_after_a_gpu_failed_it(codes, starts, tmp_path):
    """But not after wrong arguments, and not for ever; what it has found is copied meanwhile."""
    program = load_program()
    started = []

    class Session(program.Session):
        def atoll(self, name, *arguments):
            started.append(name)
            (self.work / "bench.json").write_text(str(len(started)))
            end = f"import os, signal; code = {codes[len(started) - 1]}"
            command = [
                sys.executable,
                "-c",
                f"{end}; os.kill(os.getpid(), -code) if code < 0 else exit(code)",
            ]
            self.running[name] = subprocess.Popen(command)
            return self.running[name]

    session = Session(tmp_path, "cpu", "test", time.monotonic() + 60)
    program.bench(session, tmp_path / "out")
    assert len(started) == starts
    assert (tmp_path / "out" / "bench.json").read_text() == str(starts)


def test_a_bench_that_hangs_is_killed_and_started_again(tmp_path, monkeypatch):
    program = load_program()
    monkeypatch.setattr(program, "STALLED", 1.0)
    started = []

    class Session(program.Session):
        def atoll(self, name, *arguments):
            started.append(name)
            wait = "import time; time.sleep(600)" if len(started) == 1 else ""
            self.running[name] = subprocess.Popen([sys.executable, "-c", wait])
            return self.running[name]

    program.bench(Session(tmp_path, "cpu", "test", time.monotonic() + 60), tmp_path / "out")
    assert len(started) == 2


def test_the_bench_is_not_lost_if_the_results_cannot_be_packed(tmp_path, monkeypatch):
    program = load_program()
    out = tmp_path / "out"
    out.mkdir()
    (out / "bench.json").write_text("{}")
    session = program.Session(tmp_path / "work", "cpu", "test", time.monotonic() + 60)
    (session.work / "runs/table/row-seed0").mkdir(parents=True)
    (session.work / "runs/table/row-seed0/recipe.toml").write_text("damaged")
    with pytest.raises(tomllib.TOMLDecodeError):
        program.pack(session, out)
    assert (out / "bench.json").is_file()


def test_the_seconds_count_from_the_start_of_the_script(tmp_path):
    """Imports from a cold disk are a good part of the minute that is left after the work."""
    program = load_program()
    early, late = (program.end(time.time() - before, 560) - time.monotonic() for before in (30, 0))
    assert early == pytest.approx(560 - program.PACKING - 30, abs=1)
    assert late == pytest.approx(560 - program.PACKING, abs=1)
    assert '--started "$started"' in SCRIPT.read_text().splitlines()[-1]


@pytest.mark.slow
def test_the_bench_leaves_a_part_of_the_time_to_the_tables(tmp_path):
    program = load_program()

    class Session(program.Session):
        def atoll(self, name, *arguments):
            self.process = self.running[name] = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            return self.process

    session = Session(tmp_path, "cpu", "test", time.monotonic() + 100)
    program.bench(session, tmp_path / "out", share=0.02)
    assert session.process.poll() is not None
    assert session.left > 50


@pytest.mark.parametrize(
    ("device", "together", "code", "shared"),
    [("cuda", 6, 0, True), ("cuda", 1, 0, False), ("cpu", 6, 0, False), ("cuda", 6, 1, False)],
)
def test_processes_that_share_a_gpu_run_under_its_service(
    device, together, code, shared, tmp_path, monkeypatch, capsys
):
    program = load_program()
    control = tmp_path / program.CONTROL
    control.write_text(f"#!/bin/sh\nexit {code}\n")
    control.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    session = program.Session(tmp_path, device, "test", time.monotonic() + 60)
    with program.shared_gpu(session, together):
        assert ("CUDA_MPS_PIPE_DIRECTORY" in os.environ) == shared
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    assert ("does not start" in capsys.readouterr().out) == (code == 1)


@pytest.mark.slow
def test_rows_end_before_the_service_does(tmp_path, monkeypatch):
    """It would wait for them, or they would lose the GPU."""
    program = load_program()
    (tmp_path / "tiny.toml").write_text(tomli_w.dumps(over({"base": "digits"}, read_settings(TINY))))
    (tmp_path / "mine.toml").write_text(TABLE)
    running, ended = [], []

    class Session(program.Session):
        def atoll(self, name, *arguments):
            self.running[name] = subprocess.Popen(["sleep", "600"])
            running.append(self.running[name])

    @contextmanager
    def shared_gpu(session, together):
        yield
        ended.append([process.poll() is not None for process in running])

    monkeypatch.setattr(program, "shared_gpu", shared_gpu)
    session = Session(tmp_path, "cuda", "test", time.monotonic() + 3)
    wave = {"table": str(tmp_path / "mine.toml"), "rows": ["*"], "seeds": [0, 1], "together": 3}
    program.rows(session, {**wave, "settings": ["engine.device=cpu"]})
    assert ended == [[True, True, True]]
