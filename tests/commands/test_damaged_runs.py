"""Damage in a run's folder is found and named, and what the user may do about it works."""

import shutil

import pytest

from atoll.commands.check import check_run
from atoll.commands.resume import Recovery
from atoll.commands.run import run_recipe
from atoll.core.digests import JSON, TOML, open_text
from atoll.core.errors import UserError
from atoll.core.run_folder import Run
from atoll.core.tree import load, pack
from tests.commands.interrupted import LONGER, SETTINGS, flip, resume
from tests.harness import remains, run_tiny, tiny


@pytest.fixture(scope="module")
def longer(tmp_path_factory):
    return run_tiny(tmp_path_factory.mktemp("longer") / "run", *LONGER)


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
    with pytest.raises(UserError, match=r"\(round 2\) belongs to another run, with .*other networks"):
        resume(folder)


def test_a_file_of_a_run_of_another_seed_is_named(folder, tmp_path):
    """As of a comparison's next seed, whose folder lies beside it."""
    other = run_tiny(tmp_path / "other", *SETTINGS, "seed=1").folder
    name = "checkpoints/round-000002.safetensors"
    shutil.copy(other / name, folder / name)
    assert any(
        f"{name} belongs to a run of seed 1, and not 0" in one for one in check_run(Run(folder)).damaged
    )
    with pytest.raises(UserError, match=r"\(round 2\) belongs to another run, with another seed"):
        resume(folder)
    shutil.copy(other / "partition.json", folder / "partition.json")
    sentence = r"partition\.json is damaged \(it is of seed 1, and the run of seed 0\); delete it and resume"
    assert any("it is of seed 1" in one for one in check_run(Run(folder)).damaged)
    with pytest.raises(UserError, match=sentence):
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
