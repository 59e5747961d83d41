"""`benchmarks/gpu.sh`, from end to end, at tiny size on a CPU: interrupted once, and resumed from what it left."""

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

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
changes.train.rounds = 60
changes.method.name = "fed_simclr"
"""
PLAN = '[[rows]]\ntable = "{table}"\nrows = ["*"]\ntogether = 2\n'


def start(folder, work, *arguments):
    environment = {
        **os.environ, "ATOLL_GPU_SCALE": "test", "ATOLL_GPU_DEVICE": "cpu", "ATOLL_GPU_WORK": str(work),
        "ATOLL_GPU_PLAN": str(folder / "plan.toml"), "ATOLL_GPU_SECONDS": "3000", "PYTHON": sys.executable,
        "PYTHONPATH": "", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = ["bash", str(SCRIPT), *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=folder)


def inside(out, member):
    with tarfile.open(out / "results.tar.gz") as archive:
        return archive.extractfile(member).read().decode()


@pytest.mark.slow
def test_it_is_interrupted_and_goes_on_from_what_it_left(tmp_path):
    import tomli_w

    from atoll.core.config import over, setting

    recipe: dict = {"base": "digits"}
    for text in TINY:
        recipe = over(recipe, setting(text))
    (tmp_path / "tiny.toml").write_text(tomli_w.dumps(recipe))
    (tmp_path / "mine.toml").write_text(TABLE)
    (tmp_path / "plan.toml").write_text(PLAN.format(table=tmp_path / "mine.toml"))
    first, second = tmp_path / "first", tmp_path / "second"

    work = tmp_path / "work"
    process = start(tmp_path, work, first, tmp_path)
    metrics = work / "runs" / "mine" / "long-seed0" / "metrics.jsonl"
    while process.poll() is None and not (metrics.is_file() and len(metrics.read_text().splitlines()) > 4):
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert "interrupted" in said

    (long, *_) = (run for run in json.loads(inside(first, "results.json")) if "long" in run["run"])
    assert not long["finished"]
    assert 0 < long["round"] < 60
    before = inside(first, "runs/mine/long-seed0/metrics.jsonl").splitlines()
    bench = json.loads(inside(first, "bench.json"))
    assert all(part["finished"] for part in bench["parts"].values()), bench
    assert {"fed_simclr", "ssd"} == {k for k, v in bench["parts"]["correctness"]["found"].items() if v["ok"]}
    assert list(first.glob("checkpoints.tar.*"))

    again = start(tmp_path, tmp_path / "elsewhere", second, tmp_path, first)
    said, _ = again.communicate(timeout=1200)
    assert again.returncode == 0, said
    runs = json.loads(inside(second, "results.json"))
    assert [run["finished"] for run in runs] == [True, True]
    assert all(0 < run["results"]["knn/accuracy"] <= 1 for run in runs)
    after = inside(second, "runs/mine/long-seed0/metrics.jsonl").splitlines()
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
