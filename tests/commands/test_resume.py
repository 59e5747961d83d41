"""What a resumed run may change, and what refuses it unless the user allows it."""

import json

import pytest

from atoll.commands.check import check_run
from atoll.commands.evaluate import measure_run
from atoll.commands.resume import Recovery
from atoll.commands.run import run_recipe
from atoll.core.errors import UserError
from atoll.core.run_folder import Run
from atoll.data.sources import load_data
from atoll.recipe.recipe import recipe_of
from tests.commands.interrupted import LONGER, OWN, SETTINGS, resume
from tests.harness import remains, run_tiny, tiny
from tests.trees import same


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


def test_a_finished_run_that_is_asked_for_fewer_protocols_keeps_its_results_and_says_so(folder):
    before = remains(Run(folder))
    with pytest.warns(
        UserWarning, match=r"keeps its results of all protocols, knn, though evaluation\.at_end"
    ):
        run_tiny(folder, *SETTINGS, "evaluation.at_end=[]", resume=True)
    assert same(remains(Run(folder)), before)


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


def test_a_restart_deletes_no_files_of_others(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("mine")
    with pytest.raises(UserError, match=r"would overwrite its 'metrics\.jsonl'"):
        run_recipe(tiny(*LONGER), tmp_path, recovery=Recovery(restart=True))
    assert (tmp_path / "metrics.jsonl").read_text() == "mine"


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


def test_a_resumed_run_may_accept_a_smaller_share_of_updates_and_no_larger_one(folder):
    with pytest.raises(UserError, match=r"started with train\.min_accepted = 0\.5, .* may only lower it"):
        resume(folder, "train.min_accepted=0.6")
    run = resume(folder, "train.min_accepted=0.4")
    assert (run.completed_rounds(), recipe_of(run).train.min_accepted) == (3, 0.4)


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
