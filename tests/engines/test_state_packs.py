"""Packs of client states: what was kept comes back, damage is found, and files and disk stay bounded."""

import json
import random

import pytest
import torch

from atoll.commands.check import check_run
from atoll.commands.resume import Recovery
from atoll.commands.run import run_recipe
from atoll.core.errors import UserError
from atoll.engines import client_states
from atoll.engines.client_states import ClientStates
from atoll.engines.state_packs import read_place, read_table, write_pack
from tests.harness import final_models, run_tiny, tiny
from tests.trees import same


def state(client, round):
    return {"parts": {"one": torch.full((client % 7 + 1,), float(round)), "client": client}}


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(client_states, "MOST_FILES", 6)


def test_states_of_many_rounds_come_back_from_few_files(tmp_path, few):
    """A random schedule; an oracle in memory; another instance, as a worker has it, reads what this one packs."""
    chance = random.Random(0)
    here, worker = ClientStates(tmp_path / "clients"), ClientStates(tmp_path / "clients")
    valid, kept = {}, {}
    for round in range(1, 60):
        before = dict(valid)
        for client in chance.sample(range(40), 5):
            if client in valid:
                assert same(worker.load(client, valid[client]), kept[client])
            kept[client] = state(client, round)
            worker.save(client, round, kept[client])
            valid[client] = round
        here.prune(before)
        for (
            client,
            newest,
        ) in before.items():  # a run that falls back to the checkpoint before finds its states
            assert same(ClientStates(here.folder).load(client, newest), state(client, newest))
    files = [path for path in here.folder.rglob("*") if path.is_file()]
    assert len(list(here.folder.glob("pack-*.states"))) >= 1
    assert len(files) <= 6 + 5 + 40 // 3
    held = sum(path.stat().st_size for path in files)
    one = (here.folder.parent / "one", state(6, 1))
    ClientStates(one[0]).save(6, 1, one[1])
    largest = sum(path.stat().st_size for path in one[0].rglob("*.safetensors"))
    assert held <= 3 * 40 * largest


def test_files_that_a_killed_process_left_beside_a_pack_do_no_harm(tmp_path, few, monkeypatch):
    states = ClientStates(tmp_path / "clients")
    for client in range(8):
        states.save(client, 1, state(client, 1))
    with monkeypatch.context() as patch:
        patch.setattr(type(tmp_path), "unlink", lambda path, missing_ok=False: None)
        states.prune(dict.fromkeys(range(8), 1))
    assert len(list(states.folder.glob("*/*.safetensors"))) == 8
    states.prune(dict.fromkeys(range(8), 1))
    assert not list(states.folder.glob("*/*.safetensors"))
    for client in range(8):
        assert same(ClientStates(states.folder).load(client, 1), state(client, 1))


def loaded(folder, client):
    try:
        return ClientStates(folder, resettable=True).load(client, 1)
    except UserError as error:
        return error


def test_a_flipped_bit_is_found_wherever_it_is(tmp_path, few):
    states = ClientStates(tmp_path / "clients", resettable=True)
    for client in range(7):
        states.save(client, 1, state(client, 1))
    states.prune(dict.fromkeys(range(7), 1))
    (pack,) = states.folder.glob("pack-*")
    whole = pack.read_bytes()
    chance = random.Random(0)
    for _ in range(200):
        data = bytearray(whole)
        bit = chance.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        pack.write_bytes(data)
        found = [loaded(states.folder, client) for client in range(7)]
        damaged = [client for client in range(7) if isinstance(found[client], UserError)]
        assert len(damaged) in (1, 7)
        for client in range(7):
            if client in damaged:
                assert f"--reset-client {client}" in str(found[client])
            else:
                assert same(found[client], state(client, 1))


def test_a_pack_holds_states_of_any_size_byte_for_byte(tmp_path):
    """Also of several chunks, from files and from places within another pack."""
    contents = {(client, 1): random.Random(client).randbytes((1 << 20) * client + 7) for client in range(4)}
    for (client, _), content in contents.items():
        (tmp_path / str(client)).write_bytes(content)
    first, second = tmp_path / "first", tmp_path / "second"
    write_pack(first, {key: (tmp_path / str(key[0]), 0, len(content)) for key, content in contents.items()})
    write_pack(second, read_table(first))
    for key, content in contents.items():
        assert read_place(read_table(second)[key]) == content


@pytest.mark.parametrize("lost", ["a byte of a state", "the table's digest"])
def test_a_table_that_does_not_fit_is_damaged(tmp_path, lost):
    source, pack = tmp_path / "source", tmp_path / "pack"
    source.write_bytes(bytes(100))
    write_pack(pack, {(0, 1): (source, 0, 100)})
    content = pack.read_bytes()
    table = content[100:-8]
    if lost == "a byte of a state":
        pack.write_bytes(content[1:])
    else:
        plain = json.dumps({"states": json.loads(table)["states"]}).encode()
        pack.write_bytes(content[:100] + plain + len(plain).to_bytes(8, "little"))
    with pytest.raises(UserError, match="does not fit its size" if lost.startswith("a ") else "no digest"):
        read_table(pack)


def test_a_damaged_table_harms_no_other_states(tmp_path, few):
    states = ClientStates(tmp_path / "clients", resettable=True)
    for first in (0, 7):
        for client in range(first, first + 7):
            states.save(client, 1, state(client, 1))
        states.prune(dict.fromkeys(range(first + 7), 1))
    bad = min(states.folder.glob("pack-*"))
    flip_in_table(bad)
    resumed = ClientStates(states.folder, resettable=True)
    for client in range(7, 14):
        assert same(resumed.load(client, 1), state(client, 1))
    for client in range(7):
        with pytest.raises(UserError, match=f"pack-000001.* damaged.* with --reset-client {client}, which"):
            resumed.load(client, 1)
    resumed.prune(dict.fromkeys(range(14), 1))
    assert bad.is_file()  # its clients need it
    for client in range(14):
        resumed.save(client, 2, state(client, 2))
    resumed.prune(dict.fromkeys(range(6), 2) | dict.fromkeys(range(6, 14), 1))
    assert bad.is_file()  # client 6 needs it
    resumed.prune(dict.fromkeys(range(7), 2) | dict.fromkeys(range(7, 14), 1))
    assert not bad.exists()
    assert same(ClientStates(states.folder).load(13, 1), state(13, 1))


def test_a_new_pack_does_not_replace_a_damaged_one(tmp_path, few):
    states = ClientStates(tmp_path / "clients")
    for client in range(7):
        states.save(client, 1, state(client, 1))
    states.prune(dict.fromkeys(range(7), 1))
    (bad,) = states.folder.glob("pack-*")
    flip_in_table(bad)
    damaged = bad.read_bytes()
    resumed = ClientStates(states.folder)
    for client in range(7, 14):
        resumed.save(client, 1, state(client, 1))
    resumed.prune(dict.fromkeys(range(14), 1))
    assert bad.read_bytes() == damaged
    assert same(resumed.load(13, 1), state(13, 1))


def flip_in_table(pack):
    data = bytearray(pack.read_bytes())
    data[-20] ^= 1
    pack.write_bytes(data)


def test_a_run_goes_on_without_the_states_of_a_damaged_table(tmp_path, monkeypatch):
    monkeypatch.setattr(client_states, "MOST_FILES", 2)
    settings = (
        "method.name=fedema", "partition.clients=8", "train.participation=0.5", "evaluation.at_end=[]",
    )  # fmt: skip
    run = run_tiny(tmp_path, *settings, "train.rounds=4")
    valid = run.latest()["valid"]
    held = {
        pack: [client for client, round in read_table(pack) if valid[str(client)] == round]
        for pack in (run.checkpoints / "clients").glob("pack-*")
    }
    pack = max(held, key=lambda pack: len(held[pack]))
    assert held[pack]
    flip_in_table(pack)
    assert any(pack.name in sentence for sentence in check_run(run).damaged)
    with pytest.raises(
        UserError, match=r"the state of client (\d) cannot be read .*--reset-client \1"
    ) as refused:
        run_tiny(tmp_path, *settings, "train.rounds=12", resume=True)
    assert any(f"client {client} " in str(refused.value) for client in held[pack])
    recovery = Recovery(reset_clients=tuple(held[pack]))
    run_recipe(tiny(*settings, "train.rounds=12"), tmp_path, resume=True, recovery=recovery)
    assert [line["round"] for line in run.metrics] == list(range(13))
    assert [line["reset"] for line in run.metrics if "reset" in line] == [held[pack]]
    assert check_run(run).damaged == []


def test_a_damaged_table_of_states_that_are_not_needed_stops_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(client_states, "MOST_FILES", 2)
    run = run_tiny(tmp_path / "run", "train.bn_buffers=local", "train.rounds=3")
    (pack,) = (run.checkpoints / "clients").glob("pack-*")
    flip_in_table(pack)
    run_tiny(run.folder, "train.bn_buffers=local", "train.rounds=5", resume=True)
    straight = run_tiny(tmp_path / "straight", "train.bn_buffers=local", "train.rounds=5")
    assert same(final_models(run), final_models(straight))
    assert check_run(run).damaged == []


def test_a_run_whose_states_are_packed_ends_with_the_same_bytes(tmp_path, monkeypatch):
    settings = (
        "method.name=fedema", "partition.clients=8", "train.participation=0.5", "evaluation.at_end=[]",
    )  # fmt: skip
    straight = run_tiny(tmp_path / "straight", *settings, "train.rounds=6")
    monkeypatch.setattr(client_states, "MOST_FILES", 2)
    run_tiny(tmp_path / "packed", *settings, "train.rounds=3")
    packed = run_tiny(tmp_path / "packed", *settings, "train.rounds=6", resume=True)
    assert list((packed.checkpoints / "clients").glob("pack-*.states"))
    assert packed.encoder_path.read_bytes() == straight.encoder_path.read_bytes()
