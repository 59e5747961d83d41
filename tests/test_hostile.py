"""Hostile updates, as `benchmarks/hostile.py` sends them: none crashes the server, and no forged one passes."""

import json
import math

import pytest
import torch

import forged_updates
import hostile
import hostile_first
from atoll.aggregation import em_inspector
from atoll.aggregation.em_inspector import suspicion
from atoll.core.tree import clone


@pytest.fixture(scope="module")
def scene():
    return forged_updates.make_scene()


def test_the_page_is_what_the_record_says():
    text = hostile.PAGE.read_text("utf-8")
    assert hostile.page(text, json.loads(hostile.RECORD.read_text("utf-8"))) == text


def test_the_first_round_s_table_is_what_its_record_says():
    text = hostile.PAGE.read_text("utf-8")
    assert hostile_first.page(text, json.loads(hostile_first.RECORD.read_text("utf-8"))) == text


@pytest.mark.slow
def test_no_update_of_a_wrong_form_passes_and_none_crashes(scene):
    """The round goes on, as if the client had not been there."""
    forged = forged_updates.forged(scene)
    alone, _ = hostile.play(scene, "fedavg", [None])
    for name, update in forged.items():
        model, refused = hostile.play(scene, "fedavg", [update])
        assert list(refused) == ["0"], name
        assert refused["0"].isprintable(), name
        assert all(torch.equal(model[weight], alone[weight]) for weight in alone), name
    assert len(forged) + len(forged_updates.plausible(scene)) >= 60


@pytest.mark.slow
@pytest.mark.parametrize("rule", hostile.RULES)
def test_what_passes_leaves_a_finite_model_within_the_bound(scene, rule):
    """Under FedAvg, a tenth of the clients moves the mean by at most a tenth of the bound, and its own step."""
    honest, _ = hostile.play(scene, rule, [])
    step = forged_updates.norm(scene.steps())
    for name, updates in forged_updates.plausible(scene).items():
        model, refused = hostile.play(scene, rule, clone(updates))
        assert not refused, name
        assert all(torch.isfinite(tensor).all() for tensor in model.values() if tensor.is_floating_point()), (
            name
        )
        moved = forged_updates.norm({weight: model[weight] - honest[weight] for weight in scene.trained})
        assert math.isfinite(hostile.knn(scene, model)), name
        if rule == "fedavg":
            shares = len(updates) / forged_updates.CLIENTS
            assert moved <= 1.05 * shares * (scene.bound + step), name


@pytest.mark.slow
@pytest.mark.parametrize("attackers", [2, 3, 4])
def test_em_inspector_finds_the_paper_s_attack(scene, attackers, monkeypatch):
    """Clients who implant the same backdoor into the received model are all left out; under FedAvg it stays."""
    scores = []

    def inspect(embeddings):
        scores.append(suspicion(embeddings))
        return scores[-1]

    monkeypatch.setattr(em_inspector, "suspicion", inspect)
    backdoors = [forged_updates.backdoored(scene, client) for client in range(attackers)]
    honest, _ = hostile.play(scene, "fedavg", [])
    folded, _ = hostile.play(scene, "fedavg", clone(backdoors))
    assert forged_updates.triggered(scene, backdoors[0]["weights"]) > 0.95
    # 0.1 to 0.3 for two to four attackers; it depends on the CPU's rounding
    shift = forged_updates.triggered(scene, folded) - forged_updates.triggered(scene, honest)
    assert shift > 0.05
    inspected, _ = hostile.play(scene, "em_inspector", clone(backdoors))
    (found,) = scores
    assert found[:attackers].min() > 0
    assert found[:attackers].min() > found[attackers:].max()
    assert (found[attackers:] <= 0).sum() > (found[attackers:] > 0).sum()
    # The rule leaves out honest clients, too, so that without attackers it ends elsewhere than FedAvg.
    alone, _ = hostile.play(scene, "em_inspector", [])
    assert forged_updates.triggered(scene, inspected) - forged_updates.triggered(scene, alone) < 0.6 * shift
