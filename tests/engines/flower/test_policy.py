"""A site's policy, asked directly and at a site on the fake grid."""

from __future__ import annotations

import hashlib
import time
from datetime import datetime

import pytest

pytest.importorskip("flwr", reason="the extra atoll[flower] is not installed")

import torch
from PIL import Image

from atoll.commands.egress import egress
from atoll.core.audit_log import AuditLog
from atoll.core.errors import UserError
from atoll.core.tree import num_bytes
from atoll.engines.federation import Federation
from atoll.engines.flower.codec import tree
from atoll.engines.flower.local_privacy import LocalPrivacy
from atoll.engines.flower.policy import Policy, PolicyError, WithdrawnError
from atoll.engines.flower.site import _cohort
from atoll.engines.flower.site_options import SiteOptions
from atoll.recipe.recipe import load_recipe, recipe_digest
from tests.engines.flower.grid import node
from tests.engines.flower.site_runs import FOLDERS, play, site, sites
from tests.harness import tiny


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Four sites with 12 images each."""
    draws = torch.Generator().manual_seed(0)
    for name in ("east", "north", "south", "west"):
        for split, count in (("train", 12), ("test", 4)):
            folder = tmp_path / "images" / name / split / "0"
            folder.mkdir(parents=True)
            for k in range(count):
                pixels = torch.randint(256, (8, 8), dtype=torch.uint8, generator=draws)
                Image.fromarray(pixels.numpy()).save(folder / f"{k}.png")
    monkeypatch.setenv("ATOLL_STATE", str(tmp_path / "state"))
    return tmp_path


def policy(place, text):
    path = place / "policy.toml"
    path.write_text(text)
    return str(path)


def guarded(place, text):
    """Four sites, of which west has this policy."""
    grid = sites(place)
    grid.nodes[13] = site(13, "west", place, policy=policy(place, text))
    return grid


SETTINGS = ("train.rounds=2", "train.min_accepted=0.5", "evaluation.at_end=['geometry']")


def refusal(place, text, *settings):
    """What the coordinator reads when it waits for the four sites."""
    with pytest.raises(UserError, match="3 of 4 sites connected") as error:
        play(guarded(place, text), place, *SETTINGS, *settings, wait=1.0)
    return str(error.value)


def test_a_recipe_is_allowed_by_the_hash_that_egress_prints(place):
    recipe = tiny("data.path=nowhere", *FOLDERS, *SETTINGS)
    (place / "recipe.toml").write_text(recipe.to_toml())
    digest = recipe_digest(load_recipe(place / "recipe.toml").to_toml())
    run = play(guarded(place, f'recipes = ["{digest}"]'), place, *SETTINGS)
    assert [line["clients"] for line in run.metrics[1:]] == [4, 4]
    assert (
        digest == hashlib.sha256((place / "recipe.toml").read_bytes()).hexdigest()
    )  # as sha256sum prints it


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('recipes = ["00"]', "does not list this recipe"),
        ("max_rounds = 1", "the recipe has 2 rounds, and the site's policy allows 1"),
        ("min_cohort = 3", "may aggregate only 2 of 4 updates, and the site's policy asks for 3"),
        ("max_bytes = 1000", "bytes, and the site's policy allows 1,000"),
        ('egress = ["weights", "losses"]', "contains 'samples', which the site's policy does not list"),
        ("withdrawn = true", "the site has withdrawn"),
        ("[privacy]\nclip = 1.0\nnoise_multiplier = 1.0", "sends BatchNorm's running statistics"),
    ],
)
def test_a_recipe_that_asks_for_more_is_refused_at_the_site_and_the_coordinator_reads_why(place, text, words):
    assert words in refusal(place, text)
    entries = [entry.fields for entry in AuditLog(place / "state" / "audit-west.jsonl").entries()]
    if "policy" in words or "withdrawn" in words:
        assert {entry["outcome"] for entry in entries} == {"refused"}
        assert words in entries[-1]["why"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("max_round = 1", "did you mean 'policy.max_rounds'"),
        ("max_rounds = 0", "max_rounds"),
        ('hours = "late"', 'not of the form "20:00-06:00"'),
        ('hours = "20:00+02:00-06:00"', 'not of the form "20:00-06:00"'),
        ("max_rounds =", "policy.toml is not valid TOML"),
    ],
)
def test_what_is_wrong_in_a_policy_is_in_the_sites_own_log_alone(place, text, why, caplog):
    words = refusal(place, text)
    assert "the site's policy cannot be read; the site's own log says why" in words
    assert why not in words
    assert str(place / "policy.toml") not in words
    assert why in caplog.text


def test_groups_that_take_turns_are_smaller_than_the_cohort_that_a_site_asks_for(place):
    words = refusal(place, "min_cohort = 3", "method.name=lagoon", "options.relay.groups=2")
    assert "of 2 updates, and the site's policy asks for 3" in words


def test_a_cohort_whose_size_is_drawn_may_be_smaller_than_a_site_asks_for(place):
    private = ("method.aggregation=private_fedavg", "train.bn_buffers=leave", "train.min_accepted=1.0")
    words = refusal(place, "min_cohort = 2", *private, "train.participation=0.5")
    assert "may aggregate only 1 of 2 updates, and the site's policy asks for 2" in words


def test_a_slice_of_a_component_is_named(place):
    words = refusal(place, 'egress = ["weights", "losses", "samples"]', "method.name=scaffold")
    assert "contains 'parts.scaffold'" in words


def test_a_policy_that_names_all_that_egress_lists_lets_the_update_leave(place):
    text = 'egress = ["weights", "losses", "samples", "parts.scaffold"]\nmin_cohort = 2\nmax_rounds = 2'
    heard = []

    def listen(reply):
        heard.append(tree(reply.content))
        return reply

    grid = sites(place)
    config = {"site": "west", "data": str(place / "images" / "west"), "source": "folder"}
    grid.nodes[13] = node(13, {**config, "policy": policy(place, text)}, listen)
    run = play(grid, place, *SETTINGS, "method.name=scaffold")
    assert [line["clients"] for line in run.metrics[1:]] == [4, 4]
    updates = [answer["update"] for answer in heard if "update" in answer]
    assert len(updates) == 2
    assert [answer["results"] for answer in heard if "results" in answer] == [{}, {}]  # not listed
    assert "west" not in run.read_json("evaluation.json")["sites"]
    log = AuditLog(place / "state" / "audit-west.jsonl")
    entries = [entry.fields for entry in log.entries() if entry.fields["event"] == "update"]
    assert [entry["bytes"] for entry in entries] == [num_bytes(update) for update in updates]
    weights = {f"weights.{name}" for name in updates[0]["weights"]}
    assert weights < entries[0]["tensors"].keys()


@pytest.fixture(scope="module")
def federation():
    """Four clients, of whose updates three must be accepted, for two rounds."""
    return Federation(tiny("train.bn_buffers=leave", "train.rounds=2", "train.min_accepted=0.6"))


def test_a_recipe_that_asks_for_as_much_as_is_allowed_passes(federation):
    names = ("weights", "losses", "samples")
    Policy(max_rounds=2, min_cohort=3, egress=names).check_run(federation)
    with pytest.raises(PolicyError, match="the recipe has 2 rounds"):
        Policy(max_rounds=1).check_run(federation)
    with pytest.raises(PolicyError, match="may aggregate only 3 of 4 updates"):
        Policy(min_cohort=4).check_run(federation)
    for name in names:
        with pytest.raises(PolicyError, match=f"contains '{name}', which the site's policy does not list"):
            Policy(egress=tuple({*names} - {name})).check_run(federation)


def test_a_component_that_sends_what_it_does_not_declare_must_be_listed(federation, monkeypatch):
    component = federation.recipe.composed.objective
    monkeypatch.setattr(type(component), "finish", lambda *_: (None, torch.zeros(9)))
    names = ("weights", "losses", "samples")
    with pytest.raises(PolicyError, match=f"contains 'parts.{component.name}'"):
        Policy(egress=names).check_run(federation)
    Policy(egress=(*names, f"parts.{component.name}")).check_run(federation)


def test_an_empty_list_allows_nothing(federation):
    with pytest.raises(PolicyError, match="does not list this recipe"):
        Policy(recipes=()).check_text(federation.recipe.to_toml())
    with pytest.raises(PolicyError, match="contains 'weights'"):
        Policy(egress=()).check_run(federation)
    update = {"weights": {"a": torch.zeros(1)}, "losses": {}, "parts": {}}
    with pytest.raises(PolicyError, match="contains 'weights'"):
        Policy(egress=()).outgoing(update, {})
    assert not Policy(egress=()).sends_results


@pytest.mark.parametrize("settings", [(), ("method.name=featarc",)])  # FeatARC also sends a word
def test_the_size_is_the_one_that_egress_lists(place, settings):
    """The exact size passes, and one byte less does not."""
    federation = Federation(tiny("train.bn_buffers=leave", *settings))
    size = sum(item.bytes for item in egress(federation.recipe).up)
    Policy(max_bytes=size).check_run(federation)
    with pytest.raises(PolicyError, match=f"up to {size:,} bytes"):
        Policy(max_bytes=size - 1).check_run(federation)


def test_an_aggregation_that_reports_what_it_does_not_declare_has_no_size(monkeypatch):
    """Its site is refused before the training, not after."""
    federation = Federation(tiny("train.bn_buffers=leave"))
    kind = type(federation.recipe.composed.aggregation)
    monkeypatch.setattr(kind, "report", lambda *_: {"moments": torch.zeros(9)})
    with pytest.raises(PolicyError, match="has an unknown number of bytes"):
        Policy(max_bytes=10**9).check_run(federation)


def test_no_more_updates_leave_than_the_policy_allows_over_all_runs_of_a_recipe(place):
    first = play(guarded(place, "max_rounds = 3"), place, *SETTINGS, out="one")
    assert [line["clients"] for line in first.metrics[1:]] == [4, 4]
    second = play(guarded(place, "max_rounds = 3"), place, *SETTINGS, out="two")
    assert [line["clients"] for line in second.metrics[1:]] == [4, 3]
    assert "has sent 3 updates for this recipe" in second.metrics[-1]["lost"]["3"]


def test_an_update_that_grew_beyond_the_policy_does_not_leave():
    update = {"weights": {"a": torch.zeros(100)}, "losses": {}, "parts": {}, "samples": 4}
    assert Policy(max_bytes=408).outgoing(update, {}) == update
    with pytest.raises(PolicyError, match="has 408 bytes"):
        Policy(max_bytes=407).outgoing(update, {})
    with pytest.raises(PolicyError, match=r"'parts\.spy'"):
        Policy(egress=("weights", "losses", "samples")).outgoing({**update, "parts": {"spy": 1}}, {})


@pytest.mark.parametrize(
    ("changes", "name"),
    [({"losses": {"loss": 2.0}}, "losses"), ({"samples": 0}, "samples"), ({"spy": {}}, "spy")],
)
def test_an_entry_that_is_not_listed_does_not_leave_whatever_its_value(changes, name):
    update = {"weights": {"a": torch.zeros(1)}, "losses": {}, "parts": {}}
    assert Policy(egress=("weights",)).outgoing(update, {}) == update  # no losses at all
    with pytest.raises(PolicyError, match=f"contains '{name}'"):
        Policy(egress=("weights",)).outgoing({**update, **changes}, {})


def test_an_update_leaves_clipped_and_without_its_losses_if_the_policy_adds_noise():
    pytest.importorskip("dp_accounting", reason="the extra atoll[dp] is not installed")
    received = {"a": torch.tensor([1.0, 2.0])}
    update = {
        "weights": {"a": torch.tensor([4.0, 6.0])},  # a step of norm 5
        "losses": {"loss": 2.0},
        "parts": {},
        "samples": 4,
    }
    private = Policy(privacy=LocalPrivacy(1.0, 1e-9), egress=("weights", "samples"))
    sent = private.outgoing(update, received)
    torch.testing.assert_close(sent.pop("weights")["a"], torch.tensor([1.6, 2.8]))
    assert sent == {"losses": {}, "parts": {}, "samples": 4}
    with pytest.raises(PolicyError, match="the update has more than these"):
        private.outgoing({**update, "parts": {"head": torch.zeros(1)}}, received)
    assert not private.sends_results


def test_a_site_that_has_withdrawn_answers_neither_a_recipe_nor_a_round():
    for check in (Policy(withdrawn=True).check_now, lambda: Policy(withdrawn=True).check_text("")):
        with pytest.raises(WithdrawnError, match="the site has withdrawn"):
            check()


def test_the_keys_that_a_site_sees_are_counted():
    Policy(min_cohort=3).check_cohort(3)
    Policy(min_cohort=3).check_cohort(None)
    with pytest.raises(PolicyError, match="2 clients take part in the sum, and the site's policy asks for 3"):
        Policy(min_cohort=3).check_cohort(2)


@pytest.mark.parametrize(
    ("hours", "clock", "open"),
    [
        ("20:00-06:00", "19:59", False),
        ("20:00-06:00", "20:00", True),
        ("20:00-06:00", "23:00", True),
        ("20:00-06:00", "05:59", True),
        ("20:00-06:00", "06:00", False),
        ("20:00-06:00", "12:00", False),
        ("20:00 - 06:00", "19:59", False),
        ("09:00-17:30", "09:00", True),
        ("09:00-17:30", "17:30", False),
    ],
)
def test_the_site_works_in_its_hours(hours, clock, open):
    now = datetime.fromisoformat(f"2026-05-04T{clock}")
    if open:
        Policy(hours=hours).check_now(now)
    else:
        with pytest.raises(PolicyError, match=f"works from {hours}, and its clock says {clock}"):
            Policy(hours=hours).check_now(now)


def test_a_site_says_in_which_time_zone_its_clock_is(monkeypatch):
    """That of a container is UTC, unless TZ is set."""
    hours, summer_noon = Policy(hours="20:00-06:00"), datetime(2026, 7, 1, 12)
    for zone, name in (("UTC0", "UTC"), ("CET-1CEST,M3.5.0,M10.5.0/3", "CEST")):
        with monkeypatch.context() as patch:
            patch.setenv("TZ", zone)
            time.tzset()
            with pytest.raises(PolicyError, match=f"its clock says 12:00 {name}$"):
                hours.check_now(summer_noon)
    time.tzset()


def test_a_policy_in_the_home_folder_is_read_as_the_images_and_the_state_are(place, monkeypatch):
    policy(place, "max_rounds = 3")
    monkeypatch.setenv("HOME", str(place))
    assert SiteOptions(site="west", policy="~/policy.toml").read_policy() == Policy(max_rounds=3)


def test_noise_leaves_the_site_and_nothing_else_does(place):
    pytest.importorskip("dp_accounting", reason="the extra atoll[dp] is not installed")
    heard = []

    def listen(reply):
        heard.append(tree(reply.content))
        return reply

    text = "egress = ['weights', 'samples']\n[privacy]\nclip = 0.5\nnoise_multiplier = 0.1"
    grid = sites(place)
    config = {"site": "west", "data": str(place / "images" / "west"), "source": "folder"}
    grid.nodes[13] = node(13, {**config, "policy": policy(place, text)}, listen)
    settings = (
        *SETTINGS,
        "train.bn_buffers=leave",
        "train.norm_factor=1000",
        "method.name=fed_align_uniform",
    )
    run = play(grid, place, *settings)
    assert [line["clients"] for line in run.metrics[1:]] == [4, 4]
    received = [tree(content) for at, kind, content in grid.sent if kind == "train" and at == 13]
    sent = [answer["update"] for answer in heard if "update" in answer]
    for message, update in zip(received, sent, strict=True):
        model = message["message"]["models"]["global"]
        step = torch.cat([(weight - model[name]).flatten() for name, weight in update["weights"].items()])
        assert 0.04 < step.std() < 0.08  # noise of 0.05, and a step of norm 0.5 over some thousand weights
        assert update["losses"] == {}
        assert update["parts"] == {}
    lines = [entry.fields for entry in AuditLog(place / "state" / "audit-west.jsonl").entries()]
    spent = [(line["epsilon"], line["delta"]) for line in lines if line["event"] == "update"]
    assert spent == [(LocalPrivacy(0.5, 0.1).epsilon(updates), 1e-5) for updates in (1, 2)]
    assert not [answer for answer in heard if "privacy" in answer]
    assert {"results": {}, "images": 0}.items() <= heard[-1].items()


def test_local_privacy_of_a_policy_is_built_from_its_table(tmp_path):
    policy(tmp_path, "[privacy]\nclip = 2\nnoise_multiplier = 0.5")
    assert Policy.read(tmp_path / "policy.toml").privacy == LocalPrivacy(2.0, 0.5)


def test_every_number_of_clients_in_a_request_counts():
    assert _cohort({"shares": {"2": ()}, "stayed": list(range(9))}) == 2
    assert _cohort({"keys": {"1": {}, "2": {}, "3": {}}}) == 3
    assert _cohort({"round": 1}) is None


def test_results_leave_if_the_policy_lists_them_or_lists_nothing():
    assert Policy().sends_results
    assert Policy(egress=("weights", "results")).sends_results
    assert not Policy(egress=("results",), privacy=LocalPrivacy(1.0, 1.0)).sends_results


def test_hours_have_no_time_zone():
    with pytest.raises(UserError, match=r"policy\.hours = '20:00-06:00\+02:00' is not of the form"):
        Policy(hours="20:00-06:00+02:00")


def test_hours_that_end_when_they_begin_are_refused():
    with pytest.raises(UserError, match=r"policy\.hours = '20:00-20:00' ends when it begins"):
        Policy(hours="20:00-20:00")
