"""What a site refuses in secure aggregation: all that would reveal its own term."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("flwr", reason="the extra atoll[flower] is not installed")

from atoll.engines.flower import secure_site
from atoll.engines.flower.agreed import digest_of
from atoll.engines.flower.codec import records, tree
from atoll.engines.flower.masks import is_public_key
from atoll.engines.flower.policy import PolicyError
from atoll.engines.flower.site import SiteSide
from atoll.engines.flower.site_options import SiteOptions
from tests.engines.flower.site_runs import play, sites
from tests.engines.flower.test_secure_round import SECURE, place  # noqa: F401


@pytest.mark.parametrize(
    "stage",
    [{"keys": dict.fromkeys("012")}, {"shares": dict.fromkeys("01")}, {"stayed": [0, 1, 2, 2]}],
    ids=lambda stage: next(iter(stage)),
)
def test_a_site_counts_the_clients_at_every_stage(tmp_path, stage):
    (tmp_path / "policy.toml").write_text("min_cohort = 4\n")
    places = {"state": str(tmp_path), "policy": str(tmp_path / "policy.toml")}
    side = SiteSide(SiteOptions.read({"site": "west", "data": "images", **places}))
    request = {"federation": "0" * 32, "digest": digest_of({}), "agreed": {}, "message": {}, **stage}
    with pytest.raises(PolicyError, match="3 clients take part in the sum, and the site's policy asks for 4"):
        side.train(request) if "shares" in stage else side.secure(lambda *_: {}, request)


def test_a_site_sends_no_term_whose_masks_fewer_could_open_than_the_recipe_says(place):  # noqa: F811
    grid = sites(place)
    west = grid.nodes[13]

    def lower(message):
        if message.metadata.message_type == "query.secure_shares":
            message.content = records({**tree(message.content), "threshold": 2})
        return west(message)

    grid.nodes[13] = lower
    run = play(grid, place, *SECURE, "train.rounds=1")
    assert run.metrics[-1]["lost"] == {
        "3": "the coordinator lets 2 of 4 clients open the masks, and the recipe demands 3"
    }


def test_a_site_sends_no_update_without_masks(place):  # noqa: F811
    grid = sites(place)
    west = grid.nodes[13]

    def bare(message):
        if message.metadata.message_type == "train":
            message.content = records({key: v for key, v in tree(message.content).items() if key != "shares"})
        return west(message)

    grid.nodes[13] = bare
    run = play(grid, place, *SECURE, "train.rounds=1")
    assert (
        "promises secure aggregation, and the coordinator asks for an update without"
        in run.metrics[-1]["lost"]["3"]
    )


def test_a_site_sends_one_term_under_its_masks(place):  # noqa: F811
    """The difference of two would be that of the updates, without masks."""
    grid = sites(place)
    west = grid.nodes[13]

    def twice(message):
        if message.metadata.message_type == "train":
            west(message)
        return west(message)

    grid.nodes[13] = twice
    run = play(grid, place, *SECURE, "train.rounds=1")
    assert "this site has sent its term of round 1, and does so once" in run.metrics[-1]["lost"]["3"]


def test_a_site_shares_its_secrets_once(tmp_path):
    keys = {"0": secure_site.answer_keys(tmp_path, {"round": 1})["keys"]}
    for other in (1, 2):
        keys[str(other)] = secure_site.answer_keys(tmp_path / str(other), {"round": 1})["keys"]
    request = {"round": 1, "client": 0, "keys": keys, "threshold": 2}
    assert set(secure_site.answer_shares(tmp_path, request)["shares"]) == {"1", "2"}
    with pytest.raises(ValueError, match="has shared the secrets of round 1, and does so once"):
        secure_site.answer_shares(tmp_path, request)


def agree(folder, round):
    """The first two stages at three sites, the first of which is in the folder."""
    request = {"round": round}
    keys = {
        str(k): secure_site.answer_keys(folder / f"others/{k}" if k else folder, request)["keys"]
        for k in range(3)
    }
    secure_site.answer_shares(folder, {"round": round, "client": 0, "keys": keys, "threshold": 2})


def test_a_round_is_opened_for_one_set_of_clients_only(tmp_path, monkeypatch):
    """A second sum of the same round, with or without one client, would reveal that client's term."""
    monkeypatch.setattr(secure_site, "reveal", lambda *_: {})
    for stayed in ([0, 1, 2], [2, 0, 1]):  # a coordinator that was killed repeats the round
        agree(tmp_path, 7)
        request = {"round": 7, "client": 0, "stayed": stayed}
        assert secure_site.answer_reveal(tmp_path, request) == {"shares": {}}
    agree(tmp_path, 7)
    for stayed in ([0, 1], [0, 1, 2, 3]):
        for client in (0, 1):
            with pytest.raises(ValueError, match="would reveal a single update"):
                secure_site.answer_reveal(tmp_path, {"round": 7, "client": client, "stayed": stayed})
    for other in (6, 7.0, 8):
        with pytest.raises(ValueError, match=rf"has no keys of round {re.escape(str(other))} "):
            secure_site.answer_reveal(tmp_path, {"round": other, "client": 0, "stayed": [0, 1]})
    agree(tmp_path, 8)
    assert secure_site.answer_reveal(tmp_path, {"round": 8, "client": 0, "stayed": [0, 1]}) == {"shares": {}}


def test_a_site_without_keys_says_so(tmp_path):
    with pytest.raises(ValueError, match="has no keys of round 1 "):
        secure_site.answer_reveal(tmp_path, {"round": 1, "client": 0, "stayed": [0, 1]})


def test_a_site_returns_its_public_keys_alone(tmp_path):
    answer = secure_site.answer_keys(tmp_path, {"round": 1})
    assert answer.keys() == {"keys"}
    assert answer["keys"].keys() == {"mask", "share"}
    assert all(map(is_public_key, answer["keys"].values()))


def test_a_site_sends_no_term_under_the_masks_of_another_round(place):  # noqa: F811
    grid = sites(place)
    west = grid.nodes[13]

    def later(message):
        if message.metadata.message_type == "train":
            request = tree(message.content)
            message.content = records({**request, "message": {**request["message"], "round": 2}})
        return west(message)

    grid.nodes[13] = later
    run = play(grid, place, *SECURE, "train.rounds=1")
    assert "this site has no keys of round 2 for secure aggregation" in run.metrics[-1]["lost"]["3"]


def test_a_site_whose_keys_are_damaged_says_what_can_be_done(tmp_path):
    secure_site.answer_keys(tmp_path, {"round": 1})
    (tmp_path / secure_site.FILE).write_bytes(b"damaged")
    with pytest.raises(ValueError, match="its owner restores it from a copy") as error:
        secure_site.answer_keys(tmp_path, {"round": 2})
    assert "secure.safetensors" not in str(error.value)  # the coordinator reads it
    assert "secure.safetensors is damaged" in str(error.value.__cause__)
