"""Whole runs that are killed or stopped by a signal, and resumed."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from atoll.core.run_folder import Run
from tests.harness import SSD, TINY, remains, run_tiny
from tests.trees import same

PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from tests.harness import run_tiny
run_tiny(Path(sys.argv[1]), *sys.argv[3:], resume=sys.argv[2] == "resume")
"""


def spawn(folder, resume, settings):
    program = PROGRAM.format(tests=str(Path(__file__).parents[2]))
    return subprocess.Popen(
        [sys.executable, "-c", program, str(folder), "resume" if resume else "new", *settings],
        start_new_session=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["engine.workers=1", "engine.workers=2", "engine.devices=['cpu', 'cpu']"])
def test_ten_kills_change_nothing(tmp_path, engine):
    """kill -9 at random moments, resumed each time: the same bytes as the uninterrupted run with one worker."""
    settings = (*SSD, "train.rounds=40", "train.epochs=2")
    whole = run_tiny(tmp_path / "whole", *settings)
    settings = (*settings, engine)
    chance = random.Random(engine)
    folder, kills = tmp_path / "killed", 0
    while kills < 10:
        completed_rounds = len(Run(folder).metrics)
        process = spawn(folder, kills > 0, settings)
        while not (folder / "recipe.toml").exists() and process.poll() is None:
            time.sleep(0.05)
        if chance.random() < 0.3:  # while it starts, maybe
            time.sleep(3 * chance.random())
        else:  # in a round
            while len(Run(folder).metrics) <= completed_rounds + 1 and process.poll() is None:
                time.sleep(0.01)
            time.sleep(0.3 * chance.random())
        if process.poll() is not None:
            break
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        kills += 1
    run = run_tiny(folder, *settings, resume=True)
    assert kills == 10, "the run was over before it could be killed ten times: make it longer"
    assert run.encoder_path.read_bytes() == whole.encoder_path.read_bytes()
    assert [line["round"] for line in run.metrics] == list(range(41))


STATEFUL = {
    "fedema": (),
    "fed_moco": ("options.moco.queue=64",),
    "fedca": ("options.fedca_alignment.data={source='digits'}", "options.fedca_alignment.train_epochs=1"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STATEFUL)
def test_a_kill_in_mid_round_changes_nothing_that_clients_keep(name, tmp_path):
    """One client has kept its state of a round that never was; it goes on from that of the round before."""
    settings = (f"method.name={name}", *STATEFUL[name], "train.rounds=4", "train.epochs=2")
    whole = run_tiny(tmp_path / "whole", *settings)
    process = spawn(tmp_path / "killed", False, settings)
    checkpoints = tmp_path / "killed/checkpoints"
    while not (checkpoints / "clients/000001/000002.safetensors").exists() and process.poll() is None:
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert (checkpoints / "round-000001.safetensors").exists()
    assert not (checkpoints / "round-000002.safetensors").exists(), "the round was over before the kill"
    run = run_tiny(tmp_path / "killed", *settings, resume=True)
    assert same(remains(run), remains(whole))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "code", "word"),
    [
        ("SIGINT", 130, "interrupted"),
        ("SIGTERM", 143, "stopped by SIGTERM"),
        ("SIGHUP", 129, "stopped by SIGHUP"),
    ],
)
def test_a_signal_stops_cleanly(name, code, word, tmp_path):
    signal_number = getattr(signal, name)
    command = [sys.executable, "-m", "atoll.cli.main", "run", "digits", "--out", str(tmp_path / "run")]
    settings = ["--set", *TINY, "train.rounds=4000", "engine.workers=2", "name=slow"]
    handler = signal.signal(signal_number, signal.SIG_DFL)  # a background job of a shell ignores some of them
    try:
        process = subprocess.Popen([*command, *settings], stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal_number, handler)
    try:
        while not (tmp_path / "run/checkpoints/round-000001.safetensors").exists():
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal_number)
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == code
    assert errors.strip() == (
        f"atoll: {word}; repeat the command with --resume to continue from the last complete round"
    )
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == list(range(len(lines)))
