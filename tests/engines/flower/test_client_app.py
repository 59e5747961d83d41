"""What a site writes into its audit log before an answer leaves."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="the extra atoll[flower] is not installed")

import torch

from atoll.engines.flower.client_app import logged
from atoll.engines.flower.local_privacy import LocalPrivacy
from atoll.engines.flower.site import SiteSide
from atoll.engines.flower.site_options import SiteOptions


@pytest.fixture
def site(tmp_path):
    """A site whose policy has this text."""

    def make(text=""):
        (tmp_path / "policy.toml").write_text(text)
        config = {"site": "west", "data": "x", "source": "folder", "state": str(tmp_path / "state")}
        return SiteSide(SiteOptions.read({**config, "policy": str(tmp_path / "policy.toml")}))

    return make


def answer(recipe="a digest", **privacy):
    return {"update": {"weights": {"w": torch.zeros(2)}}, "recipe": recipe, "privacy": privacy}


def request(round, run="a run"):
    return {"message": {"round": round}, "federation": run}


def updates(side):
    lines = (entry.fields for entry in side.options.audit_log.entries(incomplete=True))
    return [line for line in lines if line["event"] == "update"]


def test_of_two_updates_at_once_only_the_allowed_one_leaves(site):
    """Both requests were checked before either had answered."""
    side = site("max_rounds = 1")
    first, second = (logged(side, "train", request(k), answer()) for k in (1, 2))
    assert set(first) == {"update", "recipe", "log"}
    assert set(second) == {"lost", "log"}
    assert "has sent 1 updates for this recipe" in second["lost"]
    events = [entry.fields["event"] for entry in side.options.audit_log.entries()]
    assert events == ["update", "train"]


def test_an_extended_run_is_counted_on_and_another_run_of_another_recipe_is_not(site):
    """Another number of rounds gives the recipe another digest."""
    side = site("max_rounds = 2")
    assert "update" in logged(side, "train", request(1), answer("three rounds"))
    assert "update" in logged(side, "train", request(2), answer("five rounds"))
    assert "update" in logged(side, "train", request(1, run="another"), answer("other"))
    again = logged(side, "train", request(3), answer("five rounds"))
    assert "has sent 2 updates for this recipe" in again["lost"]


def test_epsilon_counts_every_update_with_the_noise_that_it_had(site):
    pytest.importorskip("dp_accounting", reason="the extra atoll[dp] is not installed")
    weak, strong = ({"clip": 1.0, "noise_multiplier": z, "delta": 1e-5} for z in (1.0, 50.0))
    side = site(
        "[privacy]\nclip = 1\nnoise_multiplier = 50"
    )  # the policy of now says nothing of earlier updates
    for number, (recipe, privacy) in enumerate([("a", weak), ("b", weak), ("b", strong), ("b", strong)]):
        logged(side, "train", request(number), answer(recipe, **privacy))
    lines = updates(side)
    assert [line["noise_multiplier"] for line in lines] == [1.0, 1.0, 50.0, 50.0]
    spent = [line["epsilon"] for line in lines]
    assert spent == sorted(spent)
    assert spent[:2] == [LocalPrivacy(1.0, 1.0).epsilon(updates) for updates in (1, 2)]
    assert spent[2] < 1.01 * spent[1]


def test_updates_without_noise_are_named_and_make_epsilon_infinite(site):
    """Noise that the policy asks for since the training began is not in the update."""
    side = site("[privacy]\nclip = 1\nnoise_multiplier = 2")
    logged(side, "train", request(1), answer())
    logged(side, "train", request(2), answer(clip=1.0, noise_multiplier=2.0, delta=1e-5))
    without, noisy = updates(side)
    assert not {"epsilon", "noise_multiplier"} & set(without)
    assert (noisy["epsilon"], noisy["updates_without_noise"]) == (None, 1)


def test_a_line_that_a_power_failure_cut_off_costs_no_round(site):
    side = site("max_rounds = 2")
    logged(side, "train", request(1), answer())
    with side.options.audit_log.path.open("ab") as file:
        file.write(b'{"hash": "12')
    assert "update" in logged(side, "train", request(2), answer())
    assert updates(side)[-1]["removed_incomplete_bytes"] == 12
