import math

import pytest
import torch

from atoll.functional import k_means
from tests.functional import oracles
from tests.rounds import Rounds
from tests.steps import Steps
from tests.trees import same

CALIBRE = ("method.name=calibre", "model.projector_dim=6")
NAME = "prototype_divergence"


@pytest.mark.parametrize(("iterations", "temperature"), [(20, 0.5), (1, 0.5), (20, 0.3)])
def test_the_loss_is_simclrs_and_the_prototypes(iterations, temperature):
    options = {"clusters": 6, "weight": 0.7, "iterations": iterations, "temperature": temperature}
    steps = Steps(*CALIBRE, *(f"options.prototypes.{name}={value}" for name, value in options.items()))
    batch = steps.batch()
    (h1, z1), (h2, z2) = ([t.double() for t in steps.encode(batch.images[v])] for v in ("view1", "view2"))
    draws = torch.rand(6, generator=steps.client.context.stream("prototype-seeds"))
    h = torch.cat([h1, h2]).float()
    assert not torch.equal(k_means(h, draws, 1), k_means(h, draws, 20))
    labels = k_means(h, draws, iterations).tolist()
    first, second = labels[:20], labels[20:]
    assert len(set(labels)) == 6
    expected = oracles.nt_xent(z1, z2, 0.2)
    expected += 0.7 * oracles.prototype_contrast(z1, z2, first, second, 6, temperature)
    expected += 0.7 * oracles.prototype_classification(h1, h2, first, second, 6)
    assert steps.client.step(batch).item() == pytest.approx(expected, rel=1e-4)


def test_the_prototypes_move_encoder_and_projector():
    with_term, without = (
        Rounds(*CALIBRE, f"options.prototypes.weight={weight}").train(0)[0]["weights"] for weight in (5, 0)
    )
    for name in ("encoder", "projector"):
        moved = [
            key for key in with_term if key.startswith(name) and not torch.equal(with_term[key], without[key])
        ]
        assert moved


@pytest.mark.parametrize(("normalise", "iterations"), [(True, 20), (False, 20), (True, 1)])
def test_a_client_sends_the_divergence_of_its_trained_representations(normalise, iterations):
    options = {"normalise": str(normalise).lower(), "clusters": 6, "iterations": iterations}
    rounds = Rounds(*CALIBRE, *(f"options.{NAME}.{name}={value}" for name, value in options.items()))
    update, _ = rounds.train(0)
    context = rounds.client.context
    (h,) = context.outputs(context.networks, "h")  # after its training
    draws = torch.rand(6, generator=context.stream("prototype-divergence"))
    assert not torch.equal(k_means(h, draws, 1), k_means(h, draws, 20))
    labels = k_means(h, draws, iterations).tolist()
    expected = oracles.prototype_divergence(h.double(), labels, normalise)
    assert update["parts"][NAME] == pytest.approx(expected, rel=1e-4)
    assert rounds.refused(update) is None


@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_models_count_by_images_over_divergence(weights):
    rounds = Rounds(*CALIBRE, f"options.{NAME}.weights={weights}", f"options.{NAME}.least=0.1")
    updates = {client: rounds.train(client)[0] for client in range(3)}
    for client, (samples, divergence) in enumerate([(10, 0.5), (30, 1.0), (20, 0.01)]):
        updates[client]["samples"] = samples
        updates[client]["parts"][NAME] = divergence
    rounds.fold(1, updates)
    raw = [10 / 0.5, 30 / 1.0, 20 / 0.1] if weights == "samples" else [1 / 0.5, 1.0, 1 / 0.1]
    for name, weight in rounds.server.state["models"]["global"].items():
        if weight.is_floating_point():
            models = [update["weights"][name].double() for update in updates.values()]
            expected = sum(w * model for w, model in zip(raw, models, strict=True)) / sum(raw)
            torch.testing.assert_close(weight.double(), expected, rtol=1e-5, atol=1e-6)


def test_of_equal_divergences_it_is_fedavg():
    ours, plain = Rounds(*CALIBRE), Rounds(*CALIBRE, "method.aggregation=fedavg")
    updates = {client: ours.train(client)[0] for client in range(4)}
    plain.fold(1, {client: {**update, "parts": {}} for client, update in updates.items()})
    ours.fold(1, {client: {**update, "parts": {NAME: 0.5}} for client, update in updates.items()})
    assert same(ours.server.state["models"], plain.server.state["models"])


@pytest.mark.parametrize("wrong", [-0.1, 2.1, math.nan, 1, torch.tensor(0.5)])
def test_impossible_divergences_are_refused(wrong):
    rounds = Rounds(*CALIBRE)
    update, _ = rounds.train(0)
    assert NAME in rounds.refused({**update, "parts": {NAME: wrong}})


def test_distances_of_representations_as_they_are_have_no_largest():
    rounds = Rounds(*CALIBRE, f"options.{NAME}.normalise=false")
    update, _ = rounds.train(0)
    assert rounds.refused({**update, "parts": {NAME: 50.0}}) is None


def test_clients_of_fewer_images_than_clusters_take_part():
    rounds = Rounds(*CALIBRE, "data.limit=20", "train.batch_size=4")
    update, _ = rounds.train(0)
    assert update["parts"][NAME] == pytest.approx(0, abs=1e-3)  # five images, each its own cluster
    assert rounds.refused(update) is None
    assert all(math.isfinite(loss) for loss in update["losses"].values())
