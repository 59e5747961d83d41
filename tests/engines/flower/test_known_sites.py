"""The file of the sites' keys, which decides before each round who takes part."""

from __future__ import annotations

import json
import subprocess

import pytest

pytest.importorskip("flwr", reason="the extra atoll[flower] is not installed")

from cryptography.hazmat.primitives.serialization import load_ssh_public_key

from atoll.core.audit_log import AuditLog
from atoll.core.errors import UserError
from atoll.engines.flower.known_sites import KnownSites
from atoll.engines.flower.site_registry import SiteRegistry
from atoll.engines.server import TooFewUpdatesError
from tests.engines.flower.deployment import SITES
from tests.engines.flower.grid import FakeGrid
from tests.engines.flower.site_runs import keyed, play, public_key, site, sites  # noqa: F401
from tests.engines.flower.test_ledger import SETTINGS, lines
from tests.engines.flower.test_policy import place  # noqa: F401
from tests.engines.flower.test_site_registry import clock, saying  # noqa: F401

NEW = public_key()


def deleted(text):
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("west"))


def replaced(text):
    return deleted(text) + f'west = "{NEW[0]}"\n'


def moved(text):
    return deleted(text) + '[revoked]\nwest = "stolen"\n'


def revoked(text):
    return text + '[revoked]\nwest = "stolen"\n'


GONE = "'west' is not one of the sites in sites.toml"
OTHER_KEY = "its key is not the one that sites.toml binds to 'west'"
REVOKED = "the key of 'west' was revoked: stolen"


@pytest.mark.parametrize(
    ("edit", "reason"),
    [(deleted, GONE), (replaced, OTHER_KEY), (moved, REVOKED)],
    ids=lambda one: str(one)[:20],
)
def test_a_site_that_the_edited_file_excludes_is_told_and_asked_no_more(place, keyed, caplog, edit, reason):  # noqa: F811
    grid, path = keyed
    west, asked = grid.nodes[13], []

    def edit_in_the_first_round(message):
        asked.append(message.metadata.message_type)
        if message.metadata.message_type == "train":
            path.write_text(edit(path.read_text()))
        return west(message)

    grid.nodes[13] = edit_in_the_first_round
    run = play(grid, place, *SETTINGS, keys=str(path))
    sent = [kind for node, kind, _ in grid.sent if node == 13]
    assert sent == ["query.hello", "evaluate", "train", "query.farewell"]
    assert run.metrics[-1]["lost"] == {"3": reason}
    assert [line["clients"] for line in run.metrics[1:]] == [4, 3, 3]
    assert [line["why"] for line in lines(run.folder / "audit.jsonl", "revoked")] == [reason]
    assert caplog.text.count(f"{reason}; it is asked no more") == 1


def test_a_site_comes_back_with_its_new_key_as_the_same_client_in_the_run(place, keyed):  # noqa: F811
    grid, path = keyed
    west = grid.nodes[13]

    def replace_the_key_in_the_first_round(message):
        if message.metadata.message_type == "train":
            path.write_text(replaced(path.read_text()))
            # The node with the old key stays connected.
            grid.nodes[23], grid.keys[23] = site(23, "west", place), NEW[1]
        return west(message)

    grid.nodes[13] = replace_the_key_in_the_first_round
    run = play(grid, place, *SETTINGS, keys=str(path))
    assert [kind for node, kind, _ in grid.sent if node == 13][-1] == "query.farewell"
    assert run.metrics[-1]["clients"] == 4
    west = run.read_json("sites.json")["sites"][3]
    assert (west["client"], west["name"], west["key"], west["node"]) == (3, "west", NEW[1].hex(), 23)
    about_west = [line for line in lines(run.folder / "audit.jsonl") if line.get("site") == "west"]
    events = [line["event"] for line in about_west if line["event"] not in ("asked", "received")]
    assert events == ["joined", "revoked", "joined", "readmitted"]


def test_a_resumed_run_waits_for_a_site_with_a_new_key(place, keyed):  # noqa: F811
    grid, path = keyed
    play(grid, place, *SETTINGS, "train.rounds=1", keys=str(path))
    path.write_text(replaced(path.read_text()))
    again, looks = sites(place), []
    again.keys = grid.keys
    del again.nodes[13]
    online = again.get_nodes

    def connect_later():
        looks.append(1)
        if len(looks) == 5:
            again.nodes[23], again.keys[23] = site(23, "west", place), NEW[1]
        return online()

    again.get_nodes = connect_later
    run = play(again, place, *SETTINGS, "train.rounds=2", resume=True, keys=str(path), wait=20.0)
    assert run.metrics[-1]["clients"] == 4


def test_without_the_file_another_key_under_a_name_is_still_refused(place, keyed):  # noqa: F811
    grid, path = keyed
    play(grid, place, *SETTINGS, "train.rounds=1", keys=str(path))
    grid.keys[13] = NEW[1]
    run = play(grid, place, *SETTINGS, "train.rounds=2", resume=True, wait=1.0)
    assert run.metrics[-1]["lost"] == {"3": "its site is not connected"}
    assert run.read_json("sites.json")["turned_away"][-1]["reason"] == "'west' takes part with another key"


@pytest.fixture
def registry(tmp_path, keyed, clock):  # noqa: F811
    """A registry of sites that have enrolled, which only say their names; and the file of their keys."""
    grid, path = keyed
    grid.nodes = {10 + k: saying(name, [], clock) for k, name in enumerate(SITES)}
    made = SiteRegistry(grid, "", 4, path, audit=AuditLog(tmp_path / "audit.jsonl"))
    made.gather(4, 10.0)
    return made, path


@pytest.mark.parametrize("edit", [deleted, replaced, moved, revoked])
@pytest.mark.parametrize("restarted", [False, True])
def test_a_site_is_admitted_again_when_the_edit_is_taken_back(registry, caplog, edit, restarted):
    made, path = registry
    whole = path.read_text()
    path.write_text(edit(whole))
    made.refresh()
    assert made.excluded(3)
    assert 3 not in made.connected()
    if restarted:
        before, made = made, SiteRegistry(made.grid, "", 4, path, audit=made.audit)
        made.restore(json.loads(before.to_json()))
    path.write_text(whole)
    made.refresh()
    made.refresh()
    assert made.connected() == {0: 10, 1: 11, 2: 12, 3: 13}
    assert len(lines(made.audit.path, "revoked")) == 1
    assert [line["site"] for line in lines(made.audit.path, "readmitted")] == ["west"]
    assert caplog.text.count("west is no longer excluded, and takes part again") == 1


def test_an_invalid_edit_excludes_nobody_and_the_log_says_so(registry, caplog):
    made, path = registry
    path.write_text(deleted(path.read_text()) + "[revoked]\nwest = stolen\n")
    made.refresh()
    assert 3 in made.connected()
    assert "a site that the edit should exclude STILL TAKES PART until the file is correct" in caplog.text


def test_a_revoked_name_that_no_site_has_is_told_once(registry, caplog):
    made, path = registry
    path.write_text(deleted(path.read_text()) + '[revoked]\nwest = "stolen"\neats = "stolen"\n')
    made.refresh()
    made.refresh()
    assert not made.excluded(0)
    assert caplog.text.count("sites.toml revokes 'eats', which names no site") == 1
    assert "revokes 'west'" not in caplog.text


def test_a_new_run_without_a_site_may_name_it_as_revoked(place, keyed):  # noqa: F811
    grid, path = keyed
    path.write_text(moved(path.read_text()))
    run = play(grid, place, *SETTINGS, "train.rounds=1", keys=str(path), sites=3)
    assert [one["name"] for one in run.read_json("sites.json")["sites"]] == ["east", "north", "south"]
    (turned,) = run.read_json("sites.json")["turned_away"]
    assert (turned["name"], turned["reason"]) == ("west", REVOKED)


def test_a_run_goes_on_without_revoked_sites_as_its_failure_advises(place, keyed):  # noqa: F811
    grid, path = keyed
    policy = place / "policy.toml"
    policy.write_text("min_cohort = 2")
    grid.nodes[10] = site(10, "east", place, policy=str(policy))
    settings = ("evaluation.at_end=['geometry']", "train.min_accepted=0.5")
    play(grid, place, *settings, "train.rounds=1", keys=str(path))
    path.write_text(path.read_text() + "[revoked]\n" + "".join(f'{name} = "gone"\n' for name in SITES[1:]))
    settings = (*settings, "train.rounds=2")
    with pytest.raises(TooFewUpdatesError, match=r"or lower train\.min_accepted to continue with fewer"):
        play(grid, place, *settings, resume=True, keys=str(path))
    settings = (*settings, "train.min_accepted=0.25")
    with pytest.raises(TooFewUpdatesError):
        play(grid, place, *settings, resume=True, keys=str(path), wait=1.0)
    reasons = [line["reason"] for line in lines(place / "run" / "audit.jsonl", "refused")]
    assert any("only 1 of 4 updates, and the site's policy asks for 2" in reason for reason in reasons)
    policy.write_text("min_cohort = 1")
    run = play(grid, place, *settings, resume=True, keys=str(path))
    assert [line.get("clients") for line in run.metrics[1:]] == [4, 1]


def test_a_wrong_value_names_the_file(tmp_path):
    path = tmp_path / "sites.toml"
    path.write_text("[keys]\neast = 1")
    with pytest.raises(UserError) as error:
        KnownSites.read(path)
    assert str(error.value) == f"{path}: sites.keys.east = 1 is not a text; put it in quotes"


def test_two_names_with_one_key_are_refused(tmp_path):
    path = tmp_path / "sites.toml"
    path.write_text(f'[keys]\neast = "{NEW[0]} a comment"\nwest = "{NEW[0]}"\n')
    with pytest.raises(UserError, match=r"sites\.toml gives 'east' and 'west' the same key; copy the line"):
        KnownSites.read(path)


def test_the_last_site_ends_the_reminders(clock, caplog):  # noqa: F811
    caplog.set_level("INFO")
    late = saying("east", [], clock)

    def after_a_minute(message):
        clock.now += 60.0
        return late(message)

    SiteRegistry(FakeGrid({7: after_a_minute}), "", 1).gather(1, 100.0)
    assert "waiting for" not in caplog.text


def test_a_name_belongs_to_the_key_that_the_file_binds_to_it(place, keyed):  # noqa: F811
    grid, path = keyed
    grid.keys[12], grid.keys[13] = grid.keys[13], grid.keys[12]
    with pytest.raises(UserError, match="2 of 4 sites") as error:
        play(grid, place, *SETTINGS, keys=str(path), wait=1.0)
    assert "its key is not the one that sites.toml binds to 'west'" in str(error.value)
    assert "its key is not the one that sites.toml binds to 'south'" in str(error.value)
    grid.keys[12], grid.keys[13] = grid.keys[13], grid.keys[12]
    path.write_text("\n".join(path.read_text().splitlines()[:-1]))
    with pytest.raises(UserError, match="'west' is not one of the sites in"):
        play(grid, place, *SETTINGS, keys=str(path), wait=1.0)


def test_a_key_of_ssh_keygen_is_read_as_flower_reports_it(tmp_path):
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", tmp_path / "key"], check=True
    )
    line = (tmp_path / "key.pub").read_text().strip()
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    expected = public_key_to_bytes(load_ssh_public_key(line.encode()))
    assert KnownSites({"east": line}).key("east") == expected.hex()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no table [keys]"),
        ('[keys]\neast = "ssh"', "the key of 'east' in sites.toml is no public key"),
        ("[keys", "is not valid TOML"),
        ("[keys]\neast = 1", "sites.keys.east"),
        ("[keys]\n[other]", "other"),
    ],
)
def test_a_wrong_file_of_keys_is_said(tmp_path, text, words):
    (tmp_path / "sites.toml").write_text(text)
    with pytest.raises(UserError) as error:
        KnownSites.read(tmp_path / "sites.toml")
    assert words in str(error.value)


def test_a_key_that_is_revoked_in_mid_run_is_told_and_asked_no_more(place, keyed, caplog):  # noqa: F811
    grid, path = keyed
    west, asked = grid.nodes[13], []

    def revoke_after_one_round(message):
        asked.append(message.metadata.message_type)
        reply = west(message)
        if message.metadata.message_type == "train":
            path.write_text(path.read_text() + '[revoked]\nwest = "stolen\\u001b[2J"\n')
        return reply

    grid.nodes[13] = revoke_after_one_round
    original = grid.push_messages

    def push(messages):  # a real node answers by itself; here, the farewell is delivered at once
        messages = list(messages)
        ids = original(messages)
        if messages[0].metadata.message_type == "query.farewell":
            grid.pull_messages(ids)
        return ids

    grid.push_messages = push
    run = play(grid, place, *SETTINGS, keys=str(path))
    assert asked == ["query.hello", "evaluate", "train", "query.farewell"]
    assert [line["clients"] for line in run.metrics[1:]] == [4, 3, 3]
    reason = "the key of 'west' was revoked: stolen�[2J"
    assert run.metrics[-1]["lost"] == {"3": reason}
    (line,) = lines(run.folder / "audit.jsonl", "revoked")
    assert (line["site"], line["why"]) == ("west", reason)
    (line,) = lines(place / "state" / "audit-west.jsonl", "farewell")
    assert line["why"] == reason
    assert "the coordinator asks this site no more" in caplog.text


def test_a_half_edited_file_of_keys_changes_nothing(place, keyed, caplog):  # noqa: F811
    grid, path = keyed
    registry = SiteRegistry(grid, "", 4, path)
    path.write_text("[keys")
    registry.refresh()
    assert registry._known.keys.keys() == set(SITES)
    assert "the sites' keys are as they were" in caplog.text
