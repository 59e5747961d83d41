"""A site whose launcher starts several processes: the weights are those of one process, up to rounding."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

pytest.importorskip("flwr", reason="the extra atoll[flower] is not installed")

from atoll.core.run_folder import Run
from atoll.core.tree import leaves
from atoll.engines.flower.client_app import checked
from atoll.engines.flower.launcher import launch
from atoll.engines.flower.site import SiteSide
from atoll.engines.flower.site_options import SiteOptions
from atoll.engines.server import TooFewUpdatesError
from tests.engines.flower.grid import shares
from tests.engines.flower.test_engine import play
from tests.harness import final_models
from tests.trees import same

TORCHRUN = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2"
# FedEMA's clients keep a target; with min_accepted a client that is lost stops the run.
SETTINGS = ("method.name=fedema", "partition.clients=2", "train.bn_buffers=local", "train.min_accepted=1.0")


def processes_of_a_launch() -> list[psutil.Process]:
    """The processes that train together now, which this process or one that it started asked for."""
    found = psutil.Process().children(recursive=True)
    return [one for one in found if "atoll.engines.flower.rank" in one.cmdline() and "RANK" in one.environ()]


def kill_one(after: float) -> threading.Thread:
    """Kill one of the processes that train together, some seconds after they started."""

    def work() -> None:
        while len(found := processes_of_a_launch()) < 2:
            time.sleep(0.05)
        time.sleep(after)
        found[1].kill()

    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.mark.slow
def test_a_silo_of_two_processes_is_killed_and_resumed(tmp_path, monkeypatch):
    """One site trains in two processes; the other in one."""
    monkeypatch.setenv("ATOLL_STATE", str(tmp_path / "state"))

    def silos(launcher: str):
        grid = shares(2)
        grid.nodes[100] = shares(2, launcher=launcher).nodes[100]
        return grid

    alone = play(shares(2), tmp_path / "alone", *SETTINGS)
    whole = play(silos(TORCHRUN), tmp_path / "whole", *SETTINGS, deadline=100.0)
    play(silos(TORCHRUN), tmp_path / "cut", *SETTINGS, "train.rounds=1", deadline=100.0)
    killer = kill_one(1.0)
    with pytest.raises(TooFewUpdatesError, match="round 2 failed"):
        play(silos(TORCHRUN), tmp_path / "cut", *SETTINGS, resume=True, deadline=100.0)
    killer.join()
    assert Run(tmp_path / "cut").latest()["round"] == 1
    cut = play(silos(TORCHRUN), tmp_path / "cut", *SETTINGS, resume=True, deadline=100.0)
    assert same(final_models(cut), final_models(whole))
    pairs = list(zip(leaves(final_models(whole)), leaves(final_models(alone)), strict=True))
    assert all(torch.allclose(a.float(), b.float(), rtol=2e-4, atol=2e-4) for a, b in pairs)
    assert not same(final_models(whole), final_models(alone))  # rounding shows that two processes trained
    assert not list((tmp_path / "state").rglob("launched-*"))


@pytest.mark.parametrize(
    ("launcher", "why"),
    [("no-such-command --fast", "no-such-command"), ("torchrun 'x", "No closing quotation")],
)
def test_why_a_launcher_cannot_be_started_stays_at_the_site(tmp_path, launcher, why, caplog):
    options = SiteOptions(site="north", data="images", launcher=launcher)
    reply = checked(lambda _, request: launch(options, tmp_path, request), SiteSide(options), {})
    assert reply == {
        "lost": "the launcher of 'north' cannot be started; the site's own log says why, and its owner corrects "
        "launcher=… in --node-config"
    }
    assert why in caplog.text


def test_a_launcher_that_ends_without_an_answer_reaches_the_coordinator_as_a_sentence(tmp_path, caplog):
    options = SiteOptions(site="north", data="images", launcher="false")
    reply = checked(lambda _, request: launch(options, tmp_path, request), SiteSide(options), {})
    assert reply == {
        "lost": "the launcher of 'north' ended with exit code 1; what it wrote to the terminal may say why"
    }
    assert caplog.messages == [reply["lost"]]  # no traceback


@pytest.mark.slow
def test_a_launcher_that_sets_no_ranks_is_refused(tmp_path):
    options = SiteOptions(site="north", data="images", launcher=sys.executable)
    answer = launch(options, tmp_path, {})
    assert answer["lost"].startswith("the launcher must set RANK, WORLD_SIZE")


def test_the_next_launch_deletes_what_a_killed_one_left_and_nothing_that_is_in_use(tmp_path):
    """A node that is stopped during a round cannot delete the folder with the model itself."""
    waits = tmp_path / "waits"
    waits.write_text('#!/bin/bash\necho $$ >> "${@: -1}/pid"; exec sleep 100\n')
    waits.chmod(0o700)
    code = (
        "from pathlib import Path; from atoll.engines.flower.launcher import launch; "
        "from atoll.engines.flower.site_options import SiteOptions; "
        f"launch(SiteOptions(site='n', data='d', launcher={str(waits)!r}), Path({str(tmp_path)!r}), {{}})"
    )
    asked = [psutil.Popen([sys.executable, "-c", code]) for _ in range(2)]
    while len(began := [path for path in tmp_path.glob("launched-*/pid") if path.read_text()]) < 2:
        time.sleep(0.1)
    sleepers = {path.parent: psutil.Process(int(path.read_text())) for path in began}
    (killed,) = (folder for folder, sleeper in sleepers.items() if sleeper.ppid() == asked[0].pid)
    asked[0].kill()
    asked[0].wait()
    checked(
        lambda _, request: launch(SiteOptions(site="n", launcher="false"), tmp_path, request),
        SiteSide(SiteOptions(site="n")),
        {},
    )
    assert set(tmp_path.glob("launched-*")) == set(sleepers) - {killed}
    for sleeper in sleepers.values():
        sleeper.kill()
    asked[1].wait()
    assert not list(tmp_path.glob("launched-*"))


def test_a_process_that_has_answered_ends_without_an_error():
    """While the one that asked waits for it; torchrun reports every other end as a failure."""
    code = (
        "from threading import Thread; from atoll.engines.flower.rank import _end_with_input; import time; "
        "Thread(target=_end_with_input, daemon=True).start(); time.sleep(0.5)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        assert process.wait(60) == 0


@pytest.mark.slow
def test_the_processes_end_with_the_one_that_asked(tmp_path):
    """A ClientApp that is killed leaves nobody behind."""
    code = (
        "from pathlib import Path; from atoll.engines.flower.launcher import launch; "
        "from atoll.engines.flower.site_options import SiteOptions; import sys; "
        f"launch(SiteOptions(site='n', data='d', launcher={str(tmp_path / 'waits')!r}), "
        f"Path({str(tmp_path)!r}), {{}})"
    )
    waits = tmp_path / "waits"  # as rank.py does while others compute
    waits.write_text(
        f"#!{sys.executable}\n"
        "import sys, time; from threading import Thread\n"
        "from atoll.engines.flower.rank import _end_with_input\n"
        "Thread(target=_end_with_input, daemon=True).start()\n"
        f"open({str(tmp_path / 'began')!r}, 'w').close()\n"
        "time.sleep(100)\n"
    )
    waits.chmod(0o700)
    asked = psutil.Popen([sys.executable, "-c", code], env=os.environ)
    while not Path(tmp_path / "began").exists():
        time.sleep(0.1)
    (child,) = asked.children()
    asked.kill()
    asked.wait()
    assert psutil.wait_procs([child], timeout=30)[0] == [child]
