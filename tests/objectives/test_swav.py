import copy

import pytest
import torch
from torch.nn.functional import normalize

from tests.functional import oracles
from tests.rounds import Rounds
from tests.steps import Steps, check_gradient

SWAV = ("method.name=fed_swav", "options.swav.prototypes=12", "model.projector_dim=6")
UNUSED = ("options.swav.queue=0",)


def objective(steps):
    return steps.client.context.of(steps.client.method.objective)


def directions(steps, images):
    """Embeddings of length 1, in float64."""
    return normalize(steps.encode(images)[1].double())


def prototypes(steps):
    return steps.networks["prototypes"].weight.detach().double()


def loss_of(scores, codes_of, epsilon=0.05):
    """The loss in loops, given the scores of all crops and those of which the codes are computed."""
    n = scores.shape[1]
    codes = torch.stack([oracles.swav_codes(view, epsilon, 3)[:n] for view in codes_of])
    return oracles.swav(scores, codes, 0.1)


@pytest.mark.parametrize("local", [0, 2])
def test_the_local_loss_is_the_equation_on_all_crops(local):
    steps = Steps(*SWAV, *UNUSED, f"options.swav.local_crops={local}", "views.local_size=6")
    batch = steps.batch()
    loss = steps.client.step(batch)
    crops = [batch.images["view1"], batch.images["view2"]]
    z = [directions(steps, images) for images in crops]
    if local:
        assert batch.images["local1"].shape[2:] == (6, 6)
        joined = torch.cat([batch.images["local1"], batch.images["local2"]])  # one batch for BatchNorm
        z += directions(steps, joined).chunk(2)
    scores = torch.stack(z) @ prototypes(steps).T
    assert loss.item() == pytest.approx(loss_of(scores, scores[:2]), rel=1e-4)


def test_the_gradient_is_that_of_the_predictions_with_constant_codes():
    steps = Steps(*SWAV, *UNUSED, "options.swav.fixed_epochs=0", "options.swav.epsilon=0.5")
    batch = steps.batch()

    def scores_of(networks):
        views = (batch.images[view].double() for view in ("view1", "view2"))
        with torch.no_grad():
            z = [normalize(networks["projector"](networks["encoder"](images))) for images in views]
            return torch.stack(z) @ networks["prototypes"].weight.T

    made = steps.client.step(batch)
    now = scores_of(copy.deepcopy(steps.networks).double())
    codes = torch.stack([oracles.swav_codes(view, 0.5, 3) for view in now])
    check_gradient(steps.networks, made, lambda moved: oracles.swav(scores_of(moved), codes, 0.1))


def test_the_prototypes_have_length_1_in_each_step_and_when_they_are_sent():
    steps = Steps(*SWAV, "options.swav.fixed_epochs=0", "train.lr=0.5")
    ones = torch.ones(12)
    torch.testing.assert_close(steps.networks["prototypes"].weight.norm(dim=1), ones)
    before = steps.networks["prototypes"].weight.clone()
    steps.update(steps.client.step(steps.batch()))
    after = steps.networks["prototypes"].weight
    assert not torch.equal(after, before)
    torch.testing.assert_close(after.norm(dim=1), ones)


def test_the_queue_counts_once_it_is_full_and_holds_the_newest_embeddings():
    steps = Steps(*SWAV, "options.swav.queue=30", "options.swav.queue_epochs=0")  # batches of 20
    scope, held = objective(steps), torch.zeros(2, 0, 6, dtype=torch.float64)
    for _ in range(4):
        batch = steps.batch()
        torch.testing.assert_close(scope.queue.double(), held, atol=1e-5, rtol=1e-5)
        loss = steps.client.step(batch)
        z = torch.stack([directions(steps, batch.images[view]) for view in ("view1", "view2")])
        beside = held if held.shape[1] == 30 else held[:, :0]
        scores, weight = z @ prototypes(steps).T, prototypes(steps)
        codes_of = torch.cat([scores, beside @ weight.T], dim=1)
        assert loss.item() == pytest.approx(loss_of(scores, codes_of), rel=1e-4)
        held = torch.cat([held, z], dim=1)[:, -30:]
        steps.update(loss)
    assert held.shape[1] == 30


@pytest.mark.parametrize(("epochs", "counts"), [(9, True), (10, False)])
def test_the_queue_does_not_count_before_its_epoch(epochs, counts):
    """Round 2 begins after nine epochs."""
    options = ("options.swav.queue=20", f"options.swav.queue_epochs={epochs}", "train.epochs=9")
    steps = Steps(*SWAV, *options, round=2)
    steps.update(steps.client.step(steps.batch()))
    held = objective(steps).queue.double()
    assert held.shape[1] == 20
    batch = steps.batch()
    assert batch.epoch == 0
    loss = steps.client.step(batch)
    scores = torch.stack([directions(steps, batch.images[view]) for view in ("view1", "view2")])
    scores, past = scores @ prototypes(steps).T, held @ prototypes(steps).T
    expected = loss_of(scores, torch.cat([scores, past], dim=1) if counts else scores)
    assert loss.item() == pytest.approx(expected, rel=1e-4)


def test_the_client_keeps_its_queue():
    rounds = Rounds(*SWAV, "options.swav.queue=30")
    _, kept = rounds.train(1)
    assert kept["parts"]["swav"].shape == (2, 30, 6)
    rounds.start(1, 2, kept)
    assert torch.equal(rounds.client.context.of(rounds.method.objective).queue, kept["parts"]["swav"])
    rounds.start(2, 2)
    assert rounds.client.context.of(rounds.method.objective).queue.shape == (2, 0, 6)
    without = Rounds(*SWAV, *UNUSED)
    assert without.method.keeps == ()
    assert not (without.train(1)[1] or {}).get("parts")
