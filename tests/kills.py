"""Kills at random moments: a run that was killed and resumed must end as one that was not."""

from __future__ import annotations

import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from atoll.core.run_folder import Run
from tests.harness import remains
from tests.trees import same

MOST = 10  # kills of one run


def kill_and_resume(
    runs: int, work: Callable[[Path, bool], None], ends: Callable[[Path], Any], place: Path
) -> int:
    """Do a work again and again, each time killed at random moments; return the number of kills.

    Args:
        runs: Number of runs that are killed at least once, and must end as one that was not.
        work: Starts a run in a folder, or resumes it. It runs in a forked process, whose environment is its own.
        ends: What a finished run left.
        place: Folder of all runs.
    """
    started = time.monotonic()
    assert _lives(math.inf, lambda: work(place / "whole", False))
    longest, whole = time.monotonic() - started, ends(place / "whole")
    chance, kills, done = random.Random(0), 0, 0
    while done < runs:
        folder = place / f"run{done}"
        before = kills

        def go(folder: Path = folder) -> None:
            work(folder, Run(folder).exists())

        while kills < before + MOST and not _lives(longest * chance.random() ** 2, go):
            kills += 1
        if kills == before + MOST:
            assert _lives(math.inf, go)
        assert ends(folder) == whole
        shutil.rmtree(folder)
        done += kills > before
    return kills


def _lives(seconds: float, work: Callable[[], None]) -> bool:
    """Work in a fork of this process, killed with all that it started; whether it had ended before."""
    child = os.fork()
    os.setpgid(child, child or 0)  # in both, because either may come first
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0
            return True
        time.sleep(0.002)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


class Killed:
    """A callback that kills its process after the second round."""

    def round(self, record: object, line: object) -> None:
        if record.round == 2:  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGKILL)


def ends_alike_after_kills(script: str, place: Path) -> str:
    """Check that a script's run ends with the same bytes with one and two workers, killed and resumed.

    Args:
        script: A script that is called with a folder, the number of workers, and ``kill`` or ``through``;
            ``{root!r}`` stands for the root of the project.
        place: Folder of the runs.

    Returns:
        What the run that was not killed wrote to the standard error.
    """
    path = place / "cell.py"
    path.write_text(script.format(root=str(Path(__file__).parents[1])))

    def start(folder: str, workers: int, how: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, path, place / folder, str(workers), how]
        return subprocess.run(list(map(str, command)), capture_output=True, text=True)

    whole = start("whole", 1, "through")
    assert whole.returncode == 0, whole.stderr
    for workers in (1, 2):
        folder = f"killed-{workers}"
        assert start(folder, workers, "kill").returncode == -signal.SIGKILL
        assert Run(place / folder).completed_rounds() >= 1
        resumed = start(folder, workers, "through")
        assert resumed.returncode == 0, resumed.stderr
        assert same(remains(Run(place / folder)), remains(Run(place / "whole")))
    return whole.stderr
