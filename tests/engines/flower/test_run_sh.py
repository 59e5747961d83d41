"""The trial's script, with stand-ins for the programs that it starts."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.engines.flower.deployment import EXAMPLES

PROGRAMS = {
    "python": '[[ $1 != *export_pacs.py ]] || mkdir "$2"',
    "atoll": "",
    "sleep": "",
    "flower-superlink": "",
    "flower-supernode": "",
    "flwr": 'mkdir -p "$TRIAL/run"; [[ $1 == run ]] && touch -d "1 minute" "$TRIAL/run/report.html"; true',
}


@pytest.fixture
def trial(tmp_path):
    """A function that runs the script with some programs replaced."""

    def run(*arguments, **replaced):
        (tmp_path / "bin").mkdir()
        for name, body in {**PROGRAMS, **replaced}.items():
            program = tmp_path / "bin" / name
            program.write_text(f"#!/bin/bash\n{body}\n")
            program.chmod(0o755)
        path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "TRIAL": str(tmp_path / "trial")}
        return subprocess.run(
            ["bash", EXAMPLES / "run.sh", tmp_path / "trial", *arguments],
            env=environment, capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    return run


def test_the_report_is_named(trial, tmp_path):
    done = trial()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"report: {tmp_path / 'trial' / 'run' / 'report.html'}\n"


@pytest.mark.parametrize("run", ["true", "false"])
def test_a_run_without_a_report_is_said(trial, tmp_path, run):
    (tmp_path / "trial" / "run").mkdir(parents=True)
    (tmp_path / "trial" / "run" / "report.html").touch()
    os.utime(tmp_path / "trial" / "run" / "report.html", (0, 0))  # an earlier trial's
    done = trial(flwr=f"[[ $1 != run ]] || {run}")
    assert done.returncode == 1
    assert "the run did not end with a report" in done.stderr
    assert "report:" not in done.stdout


def test_a_site_that_is_not_registered_is_said(trial):
    done = trial(flwr="[[ $1 == run ]] || { echo no SuperLink; false; }")
    assert done.returncode == 1
    assert "the SuperLink did not register art_painting" in done.stderr


def test_a_site_that_was_registered_before_takes_part(trial):
    done = trial(flwr=f"[[ $1 == run ]] || {{ echo key already in use; exit 1; }}\n{PROGRAMS['flwr']}")
    assert done.returncode == 0


def test_settings_for_an_app_that_exists_are_refused(trial, tmp_path):
    (tmp_path / "trial" / "app").mkdir(parents=True)
    done = trial("--set", "train.rounds=9")
    assert done.returncode == 1
    assert "has its settings already; choose another FOLDER for --set train.rounds=9" in done.stderr


def test_images_of_an_export_that_was_interrupted_are_exported_again(trial, tmp_path):
    (tmp_path / "trial" / "images.part" / "photo").mkdir(parents=True)
    assert trial().returncode == 0
    assert (tmp_path / "trial" / "images").is_dir()
    assert not (tmp_path / "trial" / "images" / "photo").exists()
