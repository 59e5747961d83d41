import shutil

import pytest
import torch

from atoll.core.checkpoints import checkpoint_files, load_checkpoint, save_checkpoint
from atoll.core.errors import UserError
from atoll.core.kept_models import kept_rounds
from atoll.core.tree import pack, save


def checkpoint(round):
    state = {"models": {"global": {"w": torch.ones(3)}}, "parts": {}}
    return {"round": round, "state": state, "valid": {}, "norms": [], "constants_sent": []}


def test_a_checkpoint_in_the_place_of_another_round_is_named(tmp_path):
    save_checkpoint(tmp_path, 1, checkpoint(1))
    shutil.copy(tmp_path / "round-000001.safetensors", tmp_path / "round-000002.safetensors")
    assert load_checkpoint(checkpoint_files(tmp_path)[1], 1)["round"] == 1
    with pytest.raises(UserError, match=r"from elsewhere .*round 1.*, not the checkpoint of round 2"):
        load_checkpoint(checkpoint_files(tmp_path)[2], 2)


def test_a_checkpoint_of_0_1_is_read(tmp_path):
    path = tmp_path / "round-000001.safetensors"
    path.write_bytes(pack(checkpoint(1)))
    assert load_checkpoint(path, 1)["round"] == 1


@pytest.mark.parametrize(
    "tree",
    [
        [],
        {},
        {**checkpoint(1), "round": "one"},
        {**checkpoint(1), "round": 2},
        {**checkpoint(1), "state": {}},
    ],
)
def test_another_tree_is_no_checkpoint(tmp_path, tree):
    path = tmp_path / "round-000001.safetensors"
    save(path, tree, "checkpoint of round 1")
    with pytest.raises(UserError, match="is no checkpoint of round 1"):
        load_checkpoint(path, 1)


def test_a_name_without_a_round_is_named(tmp_path):
    (tmp_path / "round-abc.safetensors").touch()
    with pytest.raises(UserError, match=r"round-abc\.safetensors is no checkpoint.*remove it"):
        checkpoint_files(tmp_path)


def test_more_than_six_digits_are_in_order(tmp_path):
    for round in (999_999, 1_000_000):
        save_checkpoint(tmp_path, round, checkpoint(round))
    assert list(checkpoint_files(tmp_path)) == [1_000_000, 999_999]


def test_a_folder_of_models_without_a_round_is_named(tmp_path):
    (tmp_path / "models" / "round-000002").mkdir(parents=True)
    assert kept_rounds(tmp_path) == [2]
    (tmp_path / "models" / "round-abc").mkdir()
    with pytest.raises(UserError, match="round-abc is no checkpoint or kept model"):
        kept_rounds(tmp_path)
