import copy
import math

import pytest
import torch

from atoll.core import tree
from tests.functional import oracles
from tests.harness import final_models, run_tiny
from tests.steps import Steps

MOON = ("method.name=moon", "train.rounds=3", "options.moon.weight=1.0")


def test_the_term_contrasts_the_embeddings_of_three_models():
    first = Steps("method.name=moon", "options.moon.temperature=0.3", "options.moon.weight=2.0")
    for _ in range(3):
        first.update(first.client.step(first.batch()))
    _, kept = first.client.finish()
    kept = tree.clone(kept)
    previous = copy.deepcopy(first.networks).eval()
    steps = Steps(
        "method.name=moon", "options.moon.temperature=0.3", "options.moon.weight=2.0", retained=kept
    )
    downloaded = copy.deepcopy(steps.networks).eval()
    steps.update(steps.client.step(steps.batch()))
    batch = steps.batch()
    total = steps.client.step(batch).item()
    z, z_global, z_previous = (
        steps.encode(batch.images["image"], networks)[1].double()
        for networks in (steps.networks, downloaded, previous)
    )
    expected = oracles.model_contrast(z, z_global, z_previous, 0.3)
    assert abs(expected - math.log(2)) > 1e-3
    losses = {name: values[-1].item() for name, values in steps.client._losses.items()}
    assert losses["moon"] == pytest.approx(expected, rel=1e-4)
    assert total == pytest.approx(losses["cross_entropy"] + 2 * expected, rel=1e-4)


def test_without_a_past_the_term_is_ln_2_and_moves_nothing():
    steps = Steps("method.name=moon")
    plain = Steps("method.name=fed_sl", "options.cross_entropy.on=z")
    for _ in range(3):
        loss, bare = steps.client.step(steps.batch()), plain.client.step(plain.batch())
        assert steps.client._losses["moon"][-1].item() == pytest.approx(math.log(2), abs=1e-6)
        steps.update(loss)
        plain.update(bare)
    # Not to the bit: opposite gradients are added to the cross-entropy's one after the other.
    for scope, other in zip(steps.networks.parameters(), plain.networks.parameters(), strict=True):
        assert torch.allclose(scope, other, atol=1e-6)


def test_a_client_keeps_its_model_and_says_so(tmp_path):
    run = run_tiny(tmp_path / "run", *MOON, "train.epochs=2")
    states = {path.parent.name: tree.load(path) for path in run.folder.glob("checkpoints/clients/*/*")}
    assert states.keys() == {f"{client:06d}" for client in range(4)}
    model = final_models(run)["global"]
    for retained in states.values():
        assert retained["parts"]["moon"].keys() == model.keys()
    assert Steps("method.name=moon").client.method.keeps == ("its model as it left the last round",)
    # Once clients have a past, the contrast is no longer the constant.
    assert abs(run.metrics[-1]["losses"]["moon"] - math.log(2)) > 1e-5


def test_beside_a_self_supervised_objective_it_reads_views():
    steps = Steps("method.name=fed_simclr", "method.terms=['moon']", "options.moon.augment=true")
    batch = steps.batch()
    assert batch.images.keys() == {"view1", "view2"}
    assert torch.isfinite(steps.client.step(batch))


@pytest.mark.slow
def test_resumed_and_with_two_workers_it_ends_with_the_same_bytes(tmp_path):
    settings = (*MOON, "train.participation=0.5", "train.rounds=4")
    straight = run_tiny(tmp_path / "straight", *settings)
    assert straight.metrics[-1]["losses"]["moon"] > 0
    run_tiny(tmp_path / "resumed", *settings, "train.rounds=2")
    resumed = run_tiny(tmp_path / "resumed", *settings, resume=True)
    workers = run_tiny(tmp_path / "workers", *settings, "engine.workers=2")
    expected = straight.encoder_path.read_bytes()
    assert resumed.encoder_path.read_bytes() == expected
    assert workers.encoder_path.read_bytes() == expected
