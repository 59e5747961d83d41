"""A run's folder when something is missing, damaged or not ours."""

import io
import json
import shutil

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from sklearn.datasets import load_digits

from atoll.compare import comparison_cells, comparison_table
from atoll.errors import UserError
from atoll.runs import Run
from harness import run_tiny


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return run_tiny(tmp_path_factory.mktemp("finished") / "run").folder


@pytest.fixture
def folder(finished, tmp_path):
    """A copy of a finished run, to be damaged."""
    return shutil.copytree(finished, tmp_path / "run")


@pytest.mark.parametrize("resume", [False, True])
def test_files_that_no_run_wrote_stay_as_they_are(tmp_path, resume):
    (tmp_path / "checkpoints").mkdir()
    for name in ("checkpoints/mine.bin", "package.json", "metrics.jsonl"):
        (tmp_path / name).write_text("mine")
    with pytest.raises(UserError, match=r"no recipe\.toml in it.*'metrics\.jsonl'; choose another --out"):
        run_tiny(tmp_path, resume=resume)
    assert {path.read_text() for path in tmp_path.rglob("*") if path.is_file()} == {"mine"}


def test_a_folder_may_hold_a_users_notes(tmp_path):
    (tmp_path / "notes.json").write_text("mine")
    assert run_tiny(tmp_path, "train.rounds=0").finished
    assert (tmp_path / "notes.json").read_text() == "mine"


def test_a_lost_encoder_is_made_again(folder, finished):
    (folder / "encoder.safetensors").unlink()
    run = run_tiny(folder, resume=True)
    assert run.encoder_path.read_bytes() == (finished / "encoder.safetensors").read_bytes()


def test_a_finished_run_is_left_alone(folder):
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    run_tiny(folder, resume=True)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()} == before


def test_a_damaged_evaluation_is_named(folder):
    (folder / "evaluation.json").write_text("{")
    with pytest.raises(UserError, match=r"evaluation\.json is damaged.*delete it, then resume"):
        run_tiny(folder, resume=True)
    (folder / "evaluation.json").unlink()
    assert run_tiny(folder, resume=True).read_json("evaluation.json")["round"] == 2


def test_metrics_cut_in_mid_line_get_the_newest_back(folder):
    lines = (folder / "metrics.jsonl").read_bytes().splitlines()
    (folder / "metrics.jsonl").write_bytes(lines[0] + b"\n" + lines[1] + b"\n" + lines[2][:9] + b"\xff")
    assert [line["round"] for line in Run(folder).metrics()] == [0, 1]
    run_tiny(folder, "train.rounds=3", resume=True)
    again = (folder / "metrics.jsonl").read_bytes().splitlines()
    assert again[:3] == lines
    assert [json.loads(line)["round"] for line in again] == [0, 1, 2, 3]


def test_a_run_that_lost_its_metrics_has_no_untrained_encoder_to_show(folder):
    (folder / "metrics.jsonl").unlink()
    console = Console(width=200, file=io.StringIO())
    console.print(comparison_table(comparison_cells([run_tiny(folder, resume=True)])))
    shown = console.file.getvalue().splitlines()
    assert next(line for line in shown if line.startswith("untrained")).split()[-1] == "–"


def test_rounds_can_only_be_raised(tmp_path, monkeypatch):
    monkeypatch.setattr("atoll.launch._finish", lambda *arguments: None)  # as if killed after the last round
    run_tiny(tmp_path)
    monkeypatch.undo()
    with pytest.raises(UserError, match="has played 2 rounds already"):
        run_tiny(tmp_path, "train.rounds=1", resume=True)


def test_a_falling_rate_is_not_stretched(tmp_path):
    run_tiny(tmp_path / "run", "train.schedule=cosine", "train.rounds=1")
    with pytest.raises(UserError, match=r"cosine.*begin it elsewhere, and warm with train\.start="):
        run_tiny(tmp_path / "run", "train.schedule=cosine", "train.rounds=2", resume=True)


def test_a_run_does_not_go_on_with_other_images(tmp_path):
    images = tmp_path / "images"
    images.mkdir()
    for i, digit in enumerate(load_digits().images[:21]):
        Image.fromarray((digit * 15).astype(np.uint8)).save(images / f"{i:02d}.png")
    settings = ("data.source=images", f"data.path={images}", "partition.clients=2", "train.rounds=1")
    run_tiny(tmp_path / "run", *settings)
    longer = (*settings, "train.rounds=2")
    (images / "03.png").write_bytes((images / "04.png").read_bytes())
    with pytest.raises(UserError, match="other training images"):
        run_tiny(tmp_path / "run", *longer, resume=True)
    Image.fromarray((load_digits().images[3] * 15).astype(np.uint8)).save(images / "03.png")
    run_tiny(tmp_path / "run", *longer, resume=True)
