"""A run's folder when something is missing, damaged or not ours."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from atoll.commands.neighbours import find_neighbours
from atoll.commands.resume import Recovery
from atoll.commands.run import run_recipe
from atoll.core.errors import UserError
from atoll.core.run_folder import HELD_OUT, Run
from atoll.engines.callbacks import Callback
from atoll.engines.server import TooFewUpdatesError
from atoll.report.comparison import comparison_cells, comparison_table
from tests.harness import printed, run_tiny, tiny


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return run_tiny(tmp_path_factory.mktemp("finished") / "run").folder


@pytest.fixture
def folder(finished, tmp_path):
    """A copy of a finished run, to be damaged."""
    return shutil.copytree(finished, tmp_path / "run")


@pytest.mark.parametrize("name", ["metrics.jsonl", "recipe.toml"])
def test_a_file_that_may_not_be_read_is_named(name, folder, monkeypatch):
    read = Path.read_bytes

    def refuse(path):
        if path.name == name:
            raise PermissionError(13, "Permission denied")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(UserError, match=rf"cannot read {folder / name}: Permission denied"):
        run_recipe(tiny("train.rounds=3"), folder, resume=True)


def test_exports_of_a_run_that_gets_more_rounds_are_out_of_date_in_every_format(folder):
    """The one in safetensors was deleted with the encoder; the others stayed and looked like the new encoder."""
    names = ("encoder-export.safetensors", "encoder-export.onnx", "encoder-a-export.pt2", "my-encoder.onnx")
    for name in names:
        (folder / name).write_text("of the old encoder")
    for name in ("encoder-export-timm", "encoder-a-export-timm"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text("{}")
    run_recipe(tiny("train.rounds=3"), folder, resume=True)
    assert sorted(path.name for path in folder.glob("*encoder*")) == [
        "encoder.safetensors",
        "my-encoder.onnx",
    ]


@pytest.mark.parametrize("resume", [False, True])
def test_files_that_no_run_wrote_stay_as_they_are(tmp_path, resume):
    (tmp_path / "checkpoints").mkdir()
    for name in ("checkpoints/mine.bin", "package.json", "metrics.jsonl"):
        (tmp_path / name).write_text("mine")
    with pytest.raises(UserError, match=r"holds no run, and.*its 'metrics\.jsonl'; choose another --out"):
        run_tiny(tmp_path, resume=resume)
    assert {path.read_text() for path in tmp_path.rglob("*") if path.is_file()} == {"mine"}


@pytest.mark.parametrize(
    "name", ["environment.json", "weights.json", "map.safetensors", "encoder-a.safetensors"]
)
def test_a_run_takes_the_place_of_no_other_file(tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(UserError, match=f"would overwrite its '{name}'"):
        run_tiny(tmp_path)
    assert (tmp_path / name).read_text() == "mine"


@pytest.mark.parametrize("step", ["check_inputs", "record_environment", "delete_evaluation"])
def test_a_run_that_is_killed_at_its_start_starts_again(tmp_path, step, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"atoll.commands.run.{step}", killed)
        with pytest.raises(KeyboardInterrupt):
            run_tiny(tmp_path / "run")
    assert run_tiny(tmp_path / "run").finished


@pytest.mark.parametrize("restart", [False, True])
def test_a_recipe_that_was_written_by_hand_stays_as_it_is(tmp_path, restart):
    (tmp_path / "recipe.toml").write_text("# my notes\nbase = 'digits'\n")
    (tmp_path / "models").mkdir()
    with pytest.raises(UserError, match=r"would overwrite its 'recipe\.toml'"):
        run_recipe(tiny(), tmp_path, recovery=Recovery(restart=restart))
    assert (tmp_path / "recipe.toml").read_text().startswith("# my notes")
    assert (tmp_path / "models").exists()


class Interrupt(Callback):
    """Interrupts a run after a round."""

    def __init__(self, after):
        self.after = after

    def round(self, record, line):
        if record.round == self.after:
            raise KeyboardInterrupt


def test_an_extended_run_that_is_interrupted_has_no_results_of_fewer_rounds(folder):
    find_neighbours(Run(folder))
    extended = tiny("train.rounds=9")
    with pytest.raises(KeyboardInterrupt):
        run_recipe(extended, folder, resume=True, callback=Interrupt(4))
    run = Run(folder)
    assert run.completed_rounds() >= 3
    assert not run.finished
    assert not list(folder.glob("*.safetensors"))  # neither an encoder nor its neighbours
    assert run_recipe(extended, folder, resume=True).results["round"] == 9


def test_results_stay_until_the_first_round_of_an_extension_is_complete(folder):
    with pytest.raises(KeyboardInterrupt):
        run_recipe(tiny("train.rounds=9"), folder, resume=True, callback=Begun())
    assert Run(folder).results["round"] == 2
    assert Run(folder).encoder_path.is_file()


class Begun(Callback):
    """Interrupts a run before its next round."""

    def begin(self, federation, server):
        raise KeyboardInterrupt


def test_a_finished_run_is_evaluated_again_for_a_protocol_that_is_new(folder):
    before = Run(folder).encoder_path.read_bytes()
    run = run_tiny(folder, "evaluation.at_end=['knn', 'geometry']", resume=True)
    assert any(key.startswith("geometry/") for key in run.results)
    assert run.encoder_path.read_bytes() == before
    assert [line["round"] for line in run.metrics] == [0, 1, 2]


def test_a_new_evaluation_that_is_interrupted_is_made_later(folder):
    wanted = tiny("evaluation.at_end=['knn', 'geometry']")
    with pytest.raises(KeyboardInterrupt):
        run_recipe(wanted, folder, resume=True, callback=Begun())
    assert not Run(folder).finished
    assert any(key.startswith("geometry/") for key in run_recipe(wanted, folder, resume=True).results)


def test_a_restart_is_no_resumption(folder):
    with pytest.raises(UserError, match="--restart deletes the run that --resume would continue"):
        run_recipe(tiny(), folder, resume=True, recovery=Recovery(restart=True))


def test_a_restart_deletes_a_link_and_not_what_it_leads_to(folder, tmp_path):
    (folder / "checkpoints").rename(tmp_path / "elsewhere")
    (folder / "checkpoints").symlink_to(tmp_path / "elsewhere")
    assert run_recipe(tiny(), folder, recovery=Recovery(restart=True)).finished
    assert list((tmp_path / "elsewhere").iterdir())


def test_a_finished_run_says_what_it_ignores(folder):
    with pytest.warns(UserWarning, match="had finished: --log, --reset-client change nothing"):
        run_recipe(tiny(), folder, resume=True, recovery=Recovery(reset_clients=(0,)))


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
    with pytest.raises(UserError, match=r"evaluation\.json is damaged.*delete it and resume"):
        run_tiny(folder, resume=True)
    (folder / "evaluation.json").unlink()
    assert run_tiny(folder, resume=True).read_json("evaluation.json")["round"] == 2


def test_metrics_cut_in_mid_line_get_the_newest_back(folder):
    lines = (folder / "metrics.jsonl").read_bytes().splitlines()
    (folder / "metrics.jsonl").write_bytes(lines[0] + b"\n" + lines[1] + b"\n" + lines[2][:9] + b"\xff")
    assert [line["round"] for line in Run(folder).metrics] == [0, 1]
    run_tiny(folder, "train.rounds=3", resume=True)
    again = (folder / "metrics.jsonl").read_bytes().splitlines()
    assert again[:3] == lines
    assert [json.loads(line)["round"] for line in again] == [0, 1, 2, 3]


def test_a_run_that_lost_its_metrics_has_no_untrained_encoder_to_show(folder):
    (folder / "metrics.jsonl").unlink()
    shown = printed(comparison_table(comparison_cells([run_tiny(folder, resume=True)]))).splitlines()
    assert next(line for line in shown if line.startswith("Untrained")).split()[-1] == "–"


def test_rounds_are_not_set_below_the_completed_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "atoll.commands.run._finish", lambda *arguments: None
    )  # as if killed after the last round
    run_tiny(tmp_path)
    monkeypatch.undo()
    with pytest.raises(
        UserError,
        match=r"has completed 2 rounds already, and train\.rounds = 1 is fewer; set train\.rounds = 2 or more",
    ):
        run_tiny(tmp_path, "train.rounds=1", resume=True)


def test_a_falling_rate_is_not_stretched(tmp_path):
    run_tiny(tmp_path / "run", "train.schedule=cosine", "train.rounds=1")
    with pytest.raises(
        UserError, match=r"cosine.*choose another --out, with train\.start=.* for a warm start"
    ):
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
    images.rename(tmp_path / "moved")
    moved = (*settings, "train.rounds=3", f"data.path={tmp_path / 'moved'}")
    run = run_tiny(tmp_path / "run", *moved, resume=True)
    whole = run_tiny(tmp_path / "whole", *moved)
    assert run.encoder_path.read_bytes() == whole.encoder_path.read_bytes()
    (tmp_path / "moved" / "03.png").write_bytes((tmp_path / "moved" / "04.png").read_bytes())
    with pytest.raises(UserError, match="other training images"):
        run_tiny(tmp_path / "run", *moved, "train.rounds=4", resume=True)


def test_a_folder_that_cannot_be_is_a_mistake(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"cannot read .*: File name too long; choose another folder"):
        run_tiny(tmp_path / ("x" * 300))
    monkeypatch.chdir(tmp_path)
    for name in ("../x", "x" * 300):  # of a recipe that was made by hand
        with pytest.raises(UserError, match="cannot name a run's folder; give it a short word"):
            run_recipe(replace(tiny(), name=name))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_that_failed_before_its_first_round_is_begun_anew_with_the_mistake_mended(tmp_path, resume):
    mistake = ("seed=3", "partition.clients=3", "train.start=nothing.safetensors")
    with pytest.raises(UserError, match=r"nothing\.safetensors"):
        run_tiny(tmp_path / "run", *mistake)
    assert (tmp_path / "run/recipe.toml").is_file()
    mended = run_tiny(tmp_path / "run", resume=resume)
    straight = run_tiny(tmp_path / "straight")
    assert mended.encoder_path.read_bytes() == straight.encoder_path.read_bytes()
    for name in ("partition.json", "recipe.toml"):
        assert (mended.folder / name).read_text() == (straight.folder / name).read_text()


@pytest.mark.parametrize("resume", [False, True])
def test_so_is_one_that_failed_in_its_first_round(tmp_path, resume):
    """The untrained encoder that it has kept was another's."""
    with pytest.raises(TooFewUpdatesError, match=r"0 of 4 .*\(train\.first_norm\).*; lower train\.lr if"):
        run_tiny(tmp_path / "run", "seed=3", "train.first_norm=1e-9")
    assert Run(tmp_path / "run").latest()["round"] == 0
    mended = run_tiny(tmp_path / "run", resume=resume)
    straight = run_tiny(tmp_path / "straight")
    assert mended.encoder_path.read_bytes() == straight.encoder_path.read_bytes()
    assert mended.metrics[0] == straight.metrics[0]
    assert [line["round"] for line in mended.metrics] == [0, 1, 2]


@pytest.mark.parametrize("left", ["checkpoints", "evaluation.json", "metrics.jsonl"])
def test_a_run_that_has_played_is_never_begun_anew(folder, left):
    """One trace of its rounds is enough."""
    for name in {"checkpoints", "evaluation.json", "metrics.jsonl"} - {left}:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(UserError, match="already holds a run; add --resume"):
        run_tiny(folder)
    with pytest.raises(UserError, match=r"started with train\.lr"):
        run_tiny(folder, "train.lr=0.01", resume=True)


def test_a_folder_of_runs_names_some_of_them(tmp_path):
    for name in ("b", "a", "d", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe.toml").touch()
    with pytest.raises(UserError, match=f"such as {tmp_path}/a, {tmp_path}/b, {tmp_path}/c$"):
        Run(tmp_path).require()


def test_a_run_that_never_began_may_have_other_held_out_images(tmp_path):
    run = Run(tmp_path / "run")
    run.folder.mkdir()
    run.write("recipe.toml", "seed = 0\n")
    run.write(HELD_OUT, '{"fingerprint": "of others"}')
    run_tiny(run.folder, "data.limit=40", "partition.clients=2", "train.rounds=1")


def test_a_folder_may_begin_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Run("~/runs/mine").folder == tmp_path / "runs" / "mine"
