"""The command, as a user meets it: exit codes and one clear sentence for every mistake."""

import json
import os
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from atoll.cli.main import _resumable, main
from atoll.core import processes
from atoll.methods.registry import METHODS
from tests.harness import TINY, run_tiny

EXAMPLES = Path(__file__).parents[2] / "examples"

# Which values they hold is said in a line.
SIXTEEN_BITS = pytest.mark.filterwarnings("ignore:.*images of more than 8 bits hold values:UserWarning")


def run(*arguments):
    return main([*map(str, arguments)])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "digits-sdd"], "no recipe 'digits-sdd'"),
        (
            ["run", "digits-ssd", "--set", "method.name=fed_simclear"],
            "unknown method 'fed_simclear'; did you mean",
        ),
        (["run", "digits-ssd", "--set", "train.ronds=3"], "did you mean 'train.rounds'"),
        (["run", "digits-ssd", "--set", "train.rounds=-3"], "train.rounds is -3; it must be at least 0"),
        (
            [
                "run",
                "digits-ssd",
                "--set",
                "partition.variant=fedu2",
                "partition.alpha=0.01",
                "partition.min_size=143",
            ],
            "lower clients or min_size",
        ),
        (["run", "digits-ssd", "--set", "data.source=images", "data.path=/no/such/place"], "/no/such/place"),
        (["run", "digits-ssd", "--set", "partition.clients=5000", "partition.kind=iid"], "5000"),
        (["run", "digits-ssd", "--set", "engine.device=cuda"], "finds no GPU"),
        (["run", "digits-ssd", "--set", "model.projector_dim=64"], "'pd' compares representations"),
        (
            ["run", "digits-ssd", "--set", "data.labels=false", "partition.kind=iid", "method.name=fed_sl"],
            "no labels",
        ),
        (["run", "digits-ssd", "--set", "name=../x"], "name = '../x' cannot name a run's folder"),
        (["egress", "digits-ssd", "--images", "-5"], "--images is -5; it must be"),
        (["report", "/no/such/run"], "holds no run"),
        (["run", "digits", "--dry-run", "--ray", "here:1"], "--ray needs --engine flower-sim"),
        (["run", "digits", "--dry-run", "--resume"], "--dry-run is about a whole run"),
        (
            ["federate", "init", "app", "--recipe", "digits", "--site-images", "9"],
            "--site-images is for --dry-run",
        ),
        (["bench", "digits", "--device", "cpu"], "--scale and --parts belong to atoll bench gpu"),
        (
            ["bench", "gpu", "--parts", "speed"],
            "the bench has no part 'speed'; the parts are 'correctness', 'rounds'",
        ),
        (["bench", "gpu", "--set", "train.lr=1"], "atoll bench gpu takes no --set"),
        (["bench", "gpu", "--device", "foo"], "--device is 'foo'; use auto, cpu or cuda"),
        (["bench", "gpu", "--device", "cpu"], "the full scale takes a CPU many hours; add --scale test"),
        (["new", "method", "mine.py", "--from", "digits"], "a new method has none"),
        (["theory", "--samples", "nan"], "at least one sample of each frequent class"),
        (["compare", "digits", "--sweep", "train.lr=0.1", "train.lr=0.2"], "--sweep names train.lr twice"),
        (["evaluate", "/no/such/run", "--protocol", "knn"], "holds no run"),
        (["embed", "/no/such/encoder.safetensors", ".", "-o", "x.npz"], "/no/such/encoder.safetensors"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_2(arguments, sentence, tmp_path, monkeypatch, capsys):
    if arguments[-1] == "engine.device=cuda" and torch.cuda.is_available():
        arguments = [*arguments[:-1], "engine.device=cuda:99"]
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("atoll: ")
    assert sentence in errors
    assert errors.count("\n") == 1
    assert list(tmp_path.iterdir()) == [], "something was written"


def test_a_fault_in_a_users_own_objective_shows_where_it_is(tmp_path, monkeypatch, capsys):
    (tmp_path / "faulty.py").write_text(
        "from dataclasses import dataclass\nimport torch\nfrom atoll.components.base import Objective\n\n\n"
        "@dataclass(frozen=True)\nclass Faulty(Objective):\n    name = 'faulty'\n\n"
        "    def loss(self, local, batch, passes):\n        return torch.ones(2, 3) @ torch.ones(2, 3)\n"
    )
    monkeypatch.chdir(tmp_path)
    settings = [*TINY, "method.name=faulty:Faulty"]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as raised:
        run("run", "digits", "--out", "one", "--set", *settings)
    assert Path(raised.traceback[-1].path).name == "faulty.py"
    assert run("compare", "digits", "--out", "several", "--set", *settings) == 1
    assert re.search(r'File ".*faulty\.py", line 11', capsys.readouterr().err)


def test_a_diverging_run_is_one_sentence_with_a_remedy_and_exit_1(tmp_path, capsys):
    settings = [*TINY, "train.first_norm=1e-9"]
    assert run("run", "digits", "--out", tmp_path / "run", "--set", *settings) == 1
    errors = capsys.readouterr().err
    assert errors.startswith("atoll: round 1 failed: 0 of 4 updates were usable")
    assert "beyond the bound of 1e-09 (train.first_norm)" in errors
    assert "lower train.lr if training diverges, or raise a bound that is too tight" in errors
    assert errors.count("\n") == 1


def test_a_text_file_called_parquet(tmp_path, capsys):
    path = tmp_path / "data.parquet"
    path.write_text("hello")
    out = tmp_path / "out"
    settings = ["data.source=parquet", f"data.path={path}"]
    assert run("run", "digits-ssd", "--out", out, "--set", *settings) == 2
    assert "data.parquet" in capsys.readouterr().err
    assert not out.exists()


@SIXTEEN_BITS
def test_a_corrupt_image_is_named_and_refused_or_skipped(images, tmp_path, capsys):
    folder = tmp_path / "images"
    shutil.copytree(images, folder)
    (folder / "13.png").write_bytes((folder / "13.png").read_bytes()[:40])
    settings = [*TINY, "data.source=images", f"data.path={folder}", "data.limit=100", "partition.clients=2"]
    assert run("run", "digits", "--out", tmp_path / "a", "--set", *settings) == 2
    assert "13.png" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()
    with pytest.warns(UserWarning, match=r"13\.png"):
        assert run("run", "digits", "--out", tmp_path / "b", "--set", *settings, "data.on_corrupt=skip") == 0


@SIXTEEN_BITS
def test_images_without_labels_show_geometry_alone_and_why(images, tmp_path, capsys):
    settings = [*TINY, "data.source=images", f"data.path={images}", "data.limit=100", "partition.clients=2"]
    settings += ["evaluation.at_end=['knn','probe','geometry']"]
    assert run("run", "digits", "--out", tmp_path / "run", "--set", *settings) == 0
    results = json.loads((tmp_path / "run/evaluation.json").read_text())
    assert "no labels" in results["note"]
    assert "geometry/uniformity" in results
    assert not any(key.startswith(("knn", "probe")) for key in results)
    assert "no labels" in capsys.readouterr().out.replace("\n", " ")


def test_a_checkpoint_of_another_recipe(finished, capsys):
    settings = [*TINY, "method.name=ssd", "train.lr=0.7"]
    assert run("run", "digits", "--out", finished, "--resume", "--set", *settings) == 2
    assert "started with train.lr" in capsys.readouterr().err


def test_methods_as_json(capsys):
    assert run("methods", "--json") == 0
    listing = json.loads(capsys.readouterr().out)
    shown = {method["name"]: (family, method) for family, methods in listing.items() for method in methods}
    assert shown.keys() == METHODS.keys()
    for name, (family, method) in shown.items():
        assert family == METHODS[name].family
        assert method["paper"] == METHODS[name].paper
    fedca, moon = shown["fedca"][1], shown["moon"][1]
    assert "the normalised projections of some of its images" in fedca["egress"]
    assert fedca["keeps"] == ["the ensembled projection of each of its images"]
    assert (fedca["supervised"], moon["supervised"]) == (False, True)
    assert moon["keeps"] == ["its model as it left the last round"]


def test_methods_in_families(capsys):
    families = [[method.family] for method in METHODS.values()]
    assert run("methods") == 0
    lines = [[cell.strip() for cell in line.split("│")] for line in capsys.readouterr().out.splitlines()]
    for name, method in METHODS.items():
        (place,) = [i for i, cells in enumerate(lines) if cells[0] == name]
        heading = max(i for i, cells in enumerate(lines[:place]) if cells in families)
        assert lines[heading] == [method.family]


def test_a_users_own_method_in_two_workers(tmp_path):
    """`module:attribute` in the user's folder, from the command, with worker processes."""
    assert len((EXAMPLES / "toy_method.py").read_text().splitlines()) <= 40
    shutil.copy(EXAMPLES / "toy_method.py", tmp_path)
    settings = [
        "--set",
        *TINY,
        "method.name=toy_method:METHOD",
        "engine.workers=2",
        "options.anchor.weight=0.25",
    ]
    command = [sys.executable, "-m", "atoll.cli.main", "run", "digits", "--out", "out", *settings]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert "Anchored SimCLR" in done.stdout
    assert "Anchored SimCLR" in (tmp_path / "out/report.html").read_text()
    lines = (tmp_path / "out/metrics.jsonl").read_text().splitlines()
    assert "anchor" in json.loads(lines[-1])["losses"]


def test_a_page_about_several_runs_is_none_of_theirs(finished, tmp_path, monkeypatch, capsys):
    other = run_tiny(tmp_path / "other")
    monkeypatch.chdir(tmp_path)
    assert run("report", str(other.folder), str(finished)) == 0
    assert capsys.readouterr().out == "report.html\n"
    assert (tmp_path / "report.html").is_file()
    assert not (other.folder / "report.html").exists()
    assert run("report", str(other.folder), str(finished)) == 2
    assert "report.html already exists and may belong to another run" in capsys.readouterr().err
    assert run("report", str(other.folder), str(finished), "-o", "report.html") == 0
    assert run("report", str(other.folder)) == 0
    assert (other.folder / "report.html").is_file()


def test_resume_continues_a_run_in_its_folder(tmp_path, capsys):
    whole = run_tiny(tmp_path / "whole", "method.name=ssd")
    half = tmp_path / "half"
    run_tiny(half, "method.name=ssd")
    for path in (*half.glob("checkpoints/round-0000002*"), *half.glob("encoder*")):
        path.unlink()
    (half / "evaluation.json").unlink()
    assert run("resume", half) == 0
    assert (half / "encoder.safetensors").read_bytes() == whole.encoder_path.read_bytes()
    assert str(half) in capsys.readouterr().out


def of_sites(made):
    """Make a run look like one of real sites."""
    partition = json.loads(made.partition_path.read_text())
    made.write("partition.json", json.dumps({**partition, "fingerprint": "sites-12ab"}))
    return made


def test_resume_of_real_sites_names_what_continues_them(tmp_path, capsys):
    made = of_sites(run_tiny(tmp_path / "run"))
    (made.folder / "evaluation.json").unlink()
    assert run("resume", made.folder) == 2
    assert "is a run of real sites, which its app continues: flwr run APP" in capsys.readouterr().err
    made.encoder_path.unlink()
    for command in (
        ["evaluate", made.folder, "--protocol", "knn"],
        ["export", made.folder, "--format", "onnx"],
    ):
        assert run(*command) == 2
        assert "has no finished encoder yet; finish it with: flwr run APP" in capsys.readouterr().err


@pytest.mark.parametrize("change", ["train.rounds=3", "evaluation.at_end=['knn','geometry','probe']"])
def test_a_finished_run_of_real_sites_is_extended_by_its_app(tmp_path, change, capsys):
    made = of_sites(run_tiny(tmp_path / "run", "evaluation.at_end=['knn','geometry']"))
    assert run("resume", made.folder) == 0  # nothing is left to do
    before = made.read("evaluation.json")
    recipe = str(made.recipe_path)
    resumed = ["run", recipe, "--resume", "--out", made.folder]
    for command in (["resume", made.folder], resumed):
        assert run(*command, "--set", change) == 2
        assert "is a run of real sites, which its app continues: flwr run APP" in capsys.readouterr().err
    assert made.read("evaluation.json") == before


def test_resume_refuses_another_recipe_and_a_folder_without_a_run(finished, capsys):
    assert run("resume", finished, "--set", "train.lr=7") == 2
    said = capsys.readouterr().err
    assert "train.lr" in said
    also = f"; that is, atoll run {finished}/recipe.toml with --out OTHER or --out {finished} --restart\n"
    assert said.endswith(also)
    assert run("resume", finished.parent / "nothing") == 2
    assert "holds no run" in capsys.readouterr().err


def test_python_m_takes_no_modules_from_the_working_folder(tmp_path):
    """Python puts the working folder first in its path; the command's own script does not."""
    for name in ("rich.py", "tomli_w.py"):
        (tmp_path / name).write_text("raise SystemExit('imported from the working folder')\n")
    command = [sys.executable, "-m", "atoll", "methods"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_runs_folder_in_place_of_a_recipe_is_told_where_its_recipe_is(finished, capsys):
    assert run("data", finished) == 2
    said = f"{finished} is a folder; give the recipe in it: {finished / 'recipe.toml'}"
    assert said in capsys.readouterr().err


def test_an_interrupted_dry_run_has_nothing_to_resume():
    options = {"command": "run", "resume": False, "restart": False}
    assert "--resume to continue" in _resumable(Namespace(**options, dry_run=False))
    assert _resumable(Namespace(**options, dry_run=True)) == ""


def test_the_advice_after_an_interruption_is_accepted_and_deletes_nothing():
    restarted = Namespace(command="run", resume=False, restart=True)
    assert "with --resume in place of --restart" in _resumable(restarted)
    resumed = Namespace(command="resume", resume=True, restart=False)  # the command has no --resume
    assert _resumable(resumed) == "; repeat the command to continue"


@pytest.mark.parametrize("arguments", [None, ["presets"]])
def test_only_the_command_may_share_a_gpu_by_default(arguments, monkeypatch):
    monkeypatch.setattr(processes, "in_command", False)
    monkeypatch.setattr(sys, "argv", ["atoll", "presets"])
    assert main(arguments) == 0
    assert processes.in_command == (arguments is None)
