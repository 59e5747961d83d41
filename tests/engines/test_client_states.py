"""What clients keep lies on disk, a file a client, and only what is still needed."""

import os
from pathlib import Path

import pytest
import torch

from atoll.core.errors import UserError
from atoll.core.run_folder import Run
from atoll.core.tree import load
from atoll.engines.client_states import ClientStates
from atoll.engines.server import Server
from tests.harness import run_tiny
from tests.steps import federation
from tests.trees import same


def folders(states):
    """The rounds whose states lie on disk, by client."""
    return {
        int(client.name): sorted(int(file.stem) for file in client.iterdir())
        for client in sorted(states.iterdir())
    }


def test_a_state_comes_back_as_it_was_kept(tmp_path):
    states = ClientStates(tmp_path / "clients")
    retained = {"parts": {"moco": torch.randn(4, 3), "fedema": {"scaler": 1.4, "round": 2}}}
    states.save(7, 2, retained)
    states.save(7, 3, {"parts": {}})
    assert same(states.load(7, 2), retained)
    assert states.load(7, 0) is None


def test_older_states_go_and_others_stay(tmp_path):
    states = ClientStates(tmp_path / "clients")
    for client, rounds in ((0, (1, 2, 3)), (1, (1,)), (2, (3,))):
        for round in rounds:
            states.save(client, round, {"round": round})
    states.prune({0: 2, 1: 1, 3: 5})
    assert folders(states.folder) == {0: [2, 3], 1: [1], 2: [3]}
    states.clear()
    assert not states.folder.exists()


def test_files_of_others_between_the_states_stay(tmp_path):
    states = ClientStates(tmp_path / "clients")
    states.save(0, 1, {"round": 1})
    others = [states.folder / name for name in ("000000/1.txt", "000000/a.safetensors", "b/1.safetensors")]
    for path in others:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    states.prune({0: 2})
    assert not states.path(0, 1).exists()
    assert [path.read_text() for path in others] == 3 * ["mine"]


def test_a_state_that_is_packed_while_it_is_loaded_comes_back(tmp_path, monkeypatch):
    states = ClientStates(tmp_path / "clients")
    states.save(7, 2, {"parts": {"moco": 1.5}})
    path, read_bytes = states.path(7, 2), Path.read_bytes

    def packed_first(file):
        if file == path and path.is_file():
            states._pack({(7, 2): path}, {})
        return read_bytes(file)

    monkeypatch.setattr(Path, "read_bytes", packed_first)
    assert states.load(7, 2) == {"parts": {"moco": 1.5}}
    assert not path.is_file()


@pytest.mark.parametrize("resettable", [False, True])
def test_a_state_that_cannot_be_read_is_named_with_what_its_place_allows(tmp_path, resettable):
    """A reset is an option of the coordinator's resumed run, and not of a site."""
    states = ClientStates(tmp_path / "clients", resettable)
    states.path(7, 2).mkdir(parents=True)
    for client in (3, 7):  # without a file, and with a folder in its place
        with pytest.raises(UserError, match=rf"cannot read .*00000{client}/000002") as error:
            states.load(client, 2)
        assert (f"--reset-client {client}" in str(error.value)) == resettable


def test_a_state_is_saved_although_its_empty_folder_is_removed_at_this_moment(tmp_path, monkeypatch):
    """As another process does that packs the client's last state."""
    states = ClientStates(tmp_path / "clients")
    folder, mkdir = states.path(7, 2).parent, Path.mkdir

    def removed_again(path, *arguments, **keywords):
        mkdir(path, *arguments, **keywords)
        if path == folder:
            monkeypatch.undo()
            path.rmdir()

    monkeypatch.setattr(Path, "mkdir", removed_again)
    states.save(7, 2, {"parts": {"moco": 1.5}})
    assert Path.mkdir is mkdir  # the folder was removed once
    assert states.load(7, 2) == {"parts": {"moco": 1.5}}


def test_a_run_holds_one_state_for_each_client_that_came(tmp_path):
    settings = ("method.name=fed_moco", "options.moco.queue=40", "train.participation=0.5", "train.rounds=4")
    states = run_tiny(tmp_path / "run", *settings).folder / "checkpoints/clients"
    made = federation(*settings)
    server = Server(made.recipe, made.setting, made.initial_weights())
    newest = {client: round for round in range(1, 5) for client in server.cohort(round)}
    assert {client: rounds[-1] for client, rounds in folders(states).items()} == newest
    assert all(len(rounds) <= 2 for rounds in folders(states).values())  # and the checkpoint's before it
    assert load(next(states.glob("*/*")))["parts"]["moco"].shape == (40, 32)


def test_a_checkpoint_names_only_states_that_are_on_the_disk(tmp_path, monkeypatch):
    synced, seen, write, fsync = set[int](), [], Run.checkpoint, os.fsync

    def note(descriptor):
        fsync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def checked(store, round, state):
        for client, newest in state["valid"].items():
            file = store.checkpoints / f"clients/{int(client):06d}/{newest:06d}.safetensors"
            seen.append(file)
            for path in (file, file.parent, file.parent.parent):
                assert path.stat().st_ino in synced, f"{path} in the checkpoint of round {round}"
        write(store, round, state)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(Run, "checkpoint", checked)
    run_tiny(tmp_path / "run", "method.name=fed_moco", "train.participation=0.5", "train.rounds=4")
    assert len(seen) > 4


def test_only_what_says_so_leaves_the_sync_for_later(tmp_path, monkeypatch):
    count = []
    monkeypatch.setattr(os, "fsync", count.append)
    ClientStates(tmp_path / "site").save(0, 1, {"round": 1})
    assert count
    del count[:]
    later = ClientStates(tmp_path / "clients", synced=False)
    later.save(0, 1, {"round": 1})
    assert not count
    later.sync([(0, 1)])
    assert count
    with pytest.raises(UserError, match=r"cannot write .*000001/000001"):
        later.sync([(0, 1), (1, 1)])
