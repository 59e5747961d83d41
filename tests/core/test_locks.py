"""Locks between processes, and systems that have none."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from atoll.core import locks
from atoll.core.locks import lock

BLOCKED = """
import sys
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None  # importing it fails, as on Windows
import multiprocessing.context, signal
del multiprocessing.context.ForkServerContext, signal.pthread_sigmask, signal.SIGHUP, signal.SIGKILL
import tests.harness
from atoll.cli.main import main
from pathlib import Path
run = tests.harness.run_tiny(Path(sys.argv[1]), "train.rounds=1")
assert run.finished
from atoll.core.processes import interrupts_blocked, why_ended
with interrupts_blocked():
    assert why_ended(-15).endswith("(SIGTERM)")
assert main(["methods"]) == 0
"""


def test_a_lock_holds_until_the_file_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("w") as file, path.open() as other:
        lock(file)
        with pytest.raises(BlockingIOError):
            lock(other, wait=False)
        file.close()
        lock(other, wait=False)


def test_a_system_without_locks_is_warned_of_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    locks._warn.cache_clear()
    with (tmp_path / "lock").open("w") as file:
        with pytest.warns(UserWarning, match="this system has no file locks"):
            lock(file, wait=False)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            lock(file)


@pytest.mark.slow
def test_a_run_needs_no_module_and_no_name_that_windows_lacks(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, tmp_path / "run"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("this system has no file locks") == 1
