"""Damage in a run's folder is found and named, and what the user may do about it works."""

import json
import shutil
import sys

import pytest

from atoll.commands.check import check_run
from atoll.commands.compare import Comparison, compare, other_runs
from atoll.commands.evaluate import measure_run
from atoll.commands.resume import Recovery
from atoll.commands.run import run_recipe
from atoll.core.digests import JSON, TOML, open_text
from atoll.core.errors import UserError
from atoll.core.run_folder import Run
from atoll.core.tree import load, pack, same
from atoll.data.sources import load_data
from atoll.recipe.recipe import recipe_of
from tests.harness import remains, run_tiny, tiny

# Each client keeps a state: its optimiser's.
SETTINGS = ("train.keep_optimizer=true", "data.limit=40", "partition.clients=2", "method.name=fed_simclr")
LONGER = (*SETTINGS, "train.rounds=3")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return run_tiny(tmp_path_factory.mktemp("finished") / "run", *SETTINGS).folder


@pytest.fixture(scope="module")
def longer(tmp_path_factory):
    return run_tiny(tmp_path_factory.mktemp("longer") / "run", *LONGER)


@pytest.fixture
def folder(finished, tmp_path):
    """A copy of a finished run, to be damaged."""
    return shutil.copytree(finished, tmp_path / "run")


def test_a_finished_run_can_be_renamed(folder):
    before = remains(Run(folder))
    text = Run(folder).read("recipe.toml")
    run_tiny(folder, *SETTINGS, "title=A better title", "name=better", "engine.workers=2", resume=True)
    named = text.replace('name = "digits"', 'name = "better"').replace(
        'title = ""', 'title = "A better title"'
    )
    assert Run(folder).read("recipe.toml") == named != text
    assert same(remains(Run(folder)), before)
    run_tiny(folder, *SETTINGS, resume=True)
    assert Run(folder).read("recipe.toml") == text


def test_a_protocol_that_the_encoder_cannot_have_leaves_a_finished_run_alone(tmp_path):
    vit = ("model.encoder=vit-tiny", "model.width=64", "model.depth=1", "model.patch=4", "model.stem=")
    at_end, refused = (
        "evaluation.at_end=",
        "'probe.* reads feature maps .*model.encoder = 'vit-tiny' has none",
    )
    run = run_tiny(tmp_path / "run", *SETTINGS, *vit, f'{at_end}["knn"]')
    before = {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=refused):
        run_tiny(run.folder, *SETTINGS, *vit, f'{at_end}["knn", "probe-l-dawa"]', resume=True)
    assert {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()} == before
    with pytest.raises(UserError, match=refused):
        run_tiny(tmp_path / "new", *SETTINGS, *vit, "evaluation.probe=l-dawa", f'{at_end}["probe"]')
    assert not (tmp_path / "new").exists()


def flip(path, byte=-3):
    data = bytearray(path.read_bytes())
    data[byte] ^= 1
    path.write_bytes(data)


def resume(folder, *settings, **recovery):
    return run_recipe(tiny(*LONGER, *settings), folder, resume=True, recovery=Recovery(**recovery))


def test_a_whole_run_passes_the_check(finished):
    checked = check_run(Run(finished))
    assert (checked.damaged, checked.unverified) == ([], [])
    assert checked.files == sum(1 for path in finished.rglob("*") if path.is_file() and path.name != ".lock")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("recipe.toml", r"recipe\.toml is damaged.*or start the run again with --restart"),
        ("partition.json", r"partition\.json is damaged.*delete it and resume"),
        ("metrics.jsonl", r"metrics\.jsonl is damaged \(line 1: its digest.*or delete it"),
        ("evaluation.json", r"evaluation\.json is damaged.*delete it and resume"),
        ("encoder.safetensors", r"encoder\.safetensors is damaged.*delete it and resume"),
        ("environment.json", r"environment\.json is damaged.*delete it and resume.*--other-environment"),
        ("checkpoints/clients/000001/000002.safetensors", r"client 1 .*damaged.*--reset-client 1"),
    ],
)
def test_one_flipped_bit_is_named_and_never_used(folder, name, sentence):
    flip(folder / name, 40 if name == "metrics.jsonl" else -3)
    rounds = 2 if name == "encoder.safetensors" else 3  # a longer run does not read it
    with pytest.raises(UserError, match=sentence):
        resume(folder, f"train.rounds={rounds}")
    assert any(name.rsplit("/")[-1] in one for one in check_run(Run(folder)).damaged)


def test_without_a_readable_checkpoint_nothing_begins_anew_silently(folder, longer):
    for path in (folder / "checkpoints").glob("round-*"):
        flip(path)
    with pytest.raises(UserError, match=r"holds no checkpoint that can be read \(.*round-000002.*--restart"):
        resume(folder)
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(
        UserError, match="holds no checkpoint that can be read, and rounds have been completed"
    ):
        resume(folder)
    assert check_run(Run(folder)).damaged != []
    (folder / "detection" / "cells").mkdir(parents=True)  # of the encoder that is made again
    again = run_recipe(tiny(*LONGER), folder, recovery=Recovery(restart=True))
    assert not (folder / "detection").exists()
    assert again.encoder_path.read_bytes() == longer.encoder_path.read_bytes()


def test_a_restart_deletes_no_files_of_others(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("mine")
    with pytest.raises(UserError, match=r"would overwrite its 'metrics\.jsonl'"):
        run_recipe(tiny(*LONGER), tmp_path, recovery=Recovery(restart=True))
    assert (tmp_path / "metrics.jsonl").read_text() == "mine"


def test_a_client_goes_on_without_its_damaged_state(folder, longer):
    flip(folder / "checkpoints/clients/000001/000002.safetensors")
    run = resume(folder, reset_clients=(1,))
    assert [line.get("reset") for line in run.metrics] == [None, None, None, [1]]
    assert run.encoder_path.read_bytes() != longer.encoder_path.read_bytes()
    with pytest.raises(UserError, match="--reset-client 7 names no client; the run's are 0 to 1"):
        run_recipe(tiny(*SETTINGS, "train.rounds=4"), folder, True, recovery=Recovery(reset_clients=(7,)))
    with pytest.raises(UserError, match="--reset-client needs --resume"):
        run_recipe(tiny(*SETTINGS), folder, recovery=Recovery(reset_clients=(1,)))


def test_a_state_in_the_place_of_another_clients_is_named(folder):
    states = folder / "checkpoints/clients"
    shutil.copy(states / "000000/000002.safetensors", states / "000001/000002.safetensors")
    with pytest.raises(UserError, match=r"client 1 .*from elsewhere \(state of client 0 after round 2\)"):
        resume(folder)


def test_a_checkpoint_of_other_networks_is_named(folder, tmp_path):
    other = run_tiny(tmp_path / "other", *SETTINGS, "model.width=8").checkpoints
    for round in (1, 2):
        name = f"round-{round:06d}.safetensors"
        shutil.copy(other / name, folder / "checkpoints" / name)
    with pytest.raises(UserError, match=r"\(round 2\) belongs to another run, with other networks"):
        resume(folder)


def test_a_folder_of_0_1_resumes_and_says_that_it_cannot_be_verified(folder, longer):
    """Its files are those of today without digests, and without the record of the environment."""
    for name in ("environment.json", "held_out.json"):
        (folder / name).unlink()
    for path in folder.glob("*.json"):
        path.write_bytes(open_text(path.read_bytes(), JSON)[0])
    (folder / "recipe.toml").write_bytes(open_text((folder / "recipe.toml").read_bytes(), TOML)[0])
    lines = (folder / "metrics.jsonl").read_bytes().splitlines()
    (folder / "metrics.jsonl").write_bytes(b"".join(open_text(line, JSON)[0] + b"\n" for line in lines))
    for path in folder.rglob("checkpoints/**/*.safetensors"):
        path.write_bytes(pack(load(path)))
    checked = check_run(Run(folder))
    assert checked.damaged == []
    assert {path.name for path in checked.unverified} >= {
        "recipe.toml",
        "metrics.jsonl",
        "round-000002.safetensors",
    }
    again, whole = remains(resume(folder)), remains(longer)
    assert again["encoders"] == whole["encoders"]


def test_other_held_out_images_are_refused(folder):
    images = load_data(recipe_of(Run(folder)).data, 0).held_out[1]
    assert Run(folder).read_json("held_out.json") == {"fingerprint": images.fingerprint}
    Run(folder).write("held_out.json", json.dumps({"fingerprint": "of others"}))
    with pytest.raises(UserError, match="was evaluated on other held-out images"):
        resume(folder)
    with pytest.raises(UserError, match=r"name images for the evaluation: --set data\.source"):
        measure_run(Run(folder), ["knn"])
    measure_run(Run(folder), ["knn"], recipe_of(Run(folder)).data)
    (folder / "held_out.json").unlink()  # a run of an earlier version
    resume(folder)


def test_another_environment_is_refused_unless_allowed(folder):
    record = Run(folder).read_json("environment.json")
    record["environments"][0]["environment"]["cpu"] = "Z80"
    Run(folder).write("environment.json", json.dumps(record))
    with pytest.raises(UserError, match=r"cpu = Z80, and here it is .*--other-environment"):
        resume(folder)
    run = resume(folder, other_environment=True)
    found = run.results["environments"]
    assert [one["after_round"] for one in found] == [0, 2]
    assert found[0]["environment"]["cpu"] == "Z80"
    assert run.results["seconds"] == pytest.approx(sum(line.get("seconds", 0) for line in run.metrics))


def test_a_run_that_lost_its_record_of_the_environment_is_refused_unless_allowed(folder):
    for name in ("environment.json", "evaluation.json"):
        (folder / name).unlink()
    sentence = (
        "environment.json is missing; restore it from a copy, or resume the run with --other-environment"
    )
    assert f"{folder}/{sentence}" in check_run(Run(folder)).damaged
    for rounds in (2, 3):
        with pytest.raises(UserError, match=sentence):
            resume(folder, f"train.rounds={rounds}")
    resume(folder, other_environment=True)
    assert not check_run(Run(folder)).damaged


def test_the_results_of_a_finished_run_keep_the_record_of_its_environments(folder):
    record = (folder / "environment.json").read_bytes()
    (folder / "environment.json").unlink()
    assert not check_run(Run(folder)).damaged
    assert resume(folder, "train.rounds=2").environments()
    assert not (folder / "environment.json").exists()
    assert resume(folder).environments() == Run(folder).results["environments"]
    assert (folder / "environment.json").read_bytes() == record


def test_a_run_that_stopped_early_is_measured_again_after_a_kill(tmp_path, monkeypatch):
    settings = (*SETTINGS, "train.rounds=8", "train.lr=1e-6", "evaluation.every=1", "evaluation.patience=1")
    settings = (*settings, "evaluation.max_epochs=1")
    run = run_tiny(tmp_path, *settings)
    assert run.results["stopped_early"]
    more = (*settings, "evaluation.at_end=['knn','probe']")
    with monkeypatch.context() as patch:
        patch.setattr("atoll.commands.run.Evaluator.final", lambda *_: killed())
        with pytest.raises(KeyboardInterrupt):
            run_tiny(tmp_path, *more, resume=True)
    assert "probe/accuracy" in run_tiny(tmp_path, *more, resume=True).results


def killed():
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        (("method.objective=dino", "options.dino.prototypes=16"), True),
        (("method.objective=dino", "options.dino.prototypes=16", "options.dino.horizon=9"), False),
        (("method.name=fedsc",), True),
        (("method.name=fedsc", "options.fedsc.last_share=1.0"), False),
    ],
)
def test_a_run_whose_loss_follows_the_number_of_rounds_is_not_extended(tmp_path, settings, refused):
    settings = ("data.limit=40", "partition.clients=2", *settings)
    run_tiny(tmp_path / "run", *settings)
    if refused:
        with pytest.raises(UserError, match=r"over which '(dino|fedsc)' changes its loss, so a longer run"):
            run_tiny(tmp_path / "run", *settings, "train.rounds=3", resume=True)
        return
    longer = run_tiny(tmp_path / "run", *settings, "train.rounds=3", resume=True)
    straight = run_tiny(tmp_path / "straight", *settings, "train.rounds=3")
    assert longer.encoder_path.read_bytes() == straight.encoder_path.read_bytes()


def test_a_comparison_starts_again_what_cannot_be_continued(tmp_path):
    recipe = tiny(*SETTINGS, "name=x")
    (run,) = compare([recipe], 1, tmp_path).runs
    for path in run.checkpoints.glob("round-*"):
        flip(path)
    longer = tiny(*LONGER, "name=x")
    (failure,) = compare([longer], 1, tmp_path).failures.values()
    assert failure.endswith("or start the run again with --restart")
    again = compare([longer], 1, tmp_path, restart=True)
    assert not again.failures
    assert again.runs[0].results["round"] == 3


@pytest.mark.parametrize("restart", [False, True])
def test_a_comparison_leaves_a_run_of_real_sites_alone(tmp_path, restart):
    run = run_tiny(tmp_path / "x-seed0", *SETTINGS, "name=x")
    run.write("partition.json", json.dumps({**run.read_json("partition.json"), "fingerprint": "sites-12ab"}))
    before = remains(run)
    with pytest.raises(UserError, match="is a run of real sites, which its app continues: flwr run APP"):
        compare([tiny(*LONGER, "name=x")], 1, tmp_path, restart=restart)
    assert same(remains(run), before)


def test_a_comparison_starts_again_a_run_whose_prerequisite_changed(tmp_path):
    alignment = tmp_path / "alignment.toml"
    settings = ("data.limit=40", "partition.clients=2", "name=x", "method.name=fedca")
    settings = (*settings, f"options.fedca_alignment.recipe={alignment}", "options.fedca_dictionary.size=16")
    centralised = (
        "partition.kind=centralised",
        "train.keep_optimizer=true",
        "evaluation.at_end=['geometry']",
    )

    def trained_at(lr):
        inner = tiny(
            "data.limit=40", "method.name=fed_simclr", *centralised, f"train.lr={lr}", "train.rounds=1"
        )
        alignment.write_text(inner.to_toml())

    trained_at(0.05)
    assert not compare([tiny(*settings, "train.rounds=1")], 1, tmp_path).failures
    trained_at(0.02)
    longer = tiny(*settings, "train.rounds=2")
    (failure,) = compare([longer], 1, tmp_path).failures.values()
    assert "needs the run in" in failure
    assert "was started with train.lr = 0.05" in failure
    assert not compare([longer], 1, tmp_path, restart=True).failures


OWN = """
from dataclasses import dataclass
from atoll.components.base import Forward, Term
from atoll.methods.method import Method
from atoll.objectives.simclr import SimCLR

@dataclass(frozen=True)
class Small(Term):
    name = "small"

    def forwards(self):
        return (Forward("view1"),)

    def loss(self, context, batch, passes):
        return passes[Forward("view1")].z.square().mean() * 0.1

METHOD = Method(objective=SimCLR(), terms=(Small(),))
"""


@pytest.fixture
def own_method(tmp_path, monkeypatch):
    """Write the method ``owned:METHOD``, and again as the text says."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # edits of one second look alike to Python

    def write(text=OWN):
        (tmp_path / "owned.py").write_text(text)
        monkeypatch.delitem(sys.modules, "owned", raising=False)

    write()
    return write


def test_a_method_that_has_changed_does_not_continue_a_run_unless_allowed(own_method, tmp_path):
    settings = (*SETTINGS, "method.name=owned:METHOD")
    run_tiny(tmp_path / "run", *settings)
    own_method(OWN + "# a comment\n")
    run_tiny(tmp_path / "run", *settings, resume=True)
    own_method(OWN.replace("0.1", "0.2"))
    for rounds in (2, 3):  # a finished run's results are not those of the changed method either
        more = (*settings, f"train.rounds={rounds}")
        with pytest.raises(UserError, match=r"another version of owned:METHOD .*--other-environment"):
            run_tiny(tmp_path / "run", *more, resume=True)
    run = run_recipe(tiny(*more), tmp_path / "run", resume=True, recovery=Recovery(other_environment=True))
    codes = [one["environment"]["code of owned:METHOD"] for one in run.results["environments"]]
    assert [one["after_round"] for one in run.results["environments"]] == [0, 2]
    assert codes[0] != codes[1]
    run_tiny(tmp_path / "run", *more, resume=True)  # which it was continued with


def test_a_comparison_trains_again_what_has_changed_if_asked(own_method, tmp_path):
    recipes = [tiny(*SETTINGS, "name=mine", "method.name=owned:METHOD"), tiny(*SETTINGS, "name=theirs")]
    mine, theirs = compare(recipes, 1, tmp_path).runs
    before = {run.name: remains(run) for run in (mine, theirs)}
    times = {run.name: (run.folder / "evaluation.json").stat().st_mtime_ns for run in (mine, theirs)}
    own_method(OWN.replace("0.1", "0.2"))
    recipes[0] = tiny(*SETTINGS, "name=mine", "method.name=owned:METHOD")
    with pytest.raises(UserError, match=r"^mine: .* another version of owned:METHOD .*--restart"):
        compare(recipes, 1, tmp_path)
    compare(recipes, 1, tmp_path, restart=True)
    assert not same(remains(mine), before[mine.name])
    assert (theirs.folder / "evaluation.json").stat().st_mtime_ns == times[theirs.name]
    assert other_runs(Comparison([mine], {}), tmp_path) == [theirs.name]
    assert other_runs(Comparison([mine], {theirs.name: "why"}), tmp_path) == []
