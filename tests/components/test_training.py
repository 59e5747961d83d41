"""The recipe's training options: rates by round, optimisers and cohorts, against formulas written out by hand."""

import math
from collections import Counter

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from atoll.components.training import TrainOptions, learning_rate, make_optimizer
from tests.rounds import Rounds
from tests.trees import same


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", {1: 0.4, 6: 0.4, 10: 0.4}),
        ("cosine", {1: 0.4, 6: 0.2, 10: 0.2 * (1 + math.cos(0.9 * math.pi))}),
        ("step", {1: 0.4, 6: 0.4, 7: 0.04, 8: 0.04, 9: 0.004, 10: 0.004}),  # after 6 and 8 of the ten rounds
    ],
)
def test_the_rate_of_a_round(schedule, rates):
    train = TrainOptions(rounds=10, lr=0.4, schedule=schedule)
    assert {round: learning_rate(train, round) for round in rates} == pytest.approx(rates)


def test_a_client_trains_at_the_rate_of_its_round():
    falling = Rounds("method.name=fed_simclr", "train.rounds=10", "train.schedule=cosine", "train.lr=0.4")
    half = Rounds("method.name=fed_simclr", "train.rounds=10", "train.lr=0.2")
    assert same(falling.train(0, 6)[0]["weights"], half.train(0, 6)[0]["weights"])
    assert not same(falling.train(0, 5)[0]["weights"], half.train(0, 5)[0]["weights"])


GRADIENTS = torch.tensor([[1.0, -2.0], [0.5, 3.0], [-1.0, 0.25]], dtype=torch.float64)


def steps(train):
    """Weights after each step, from the gradients above."""
    weight = nn.Parameter(torch.tensor([0.3, -0.7], dtype=torch.float64))
    optimizer = make_optimizer(train, [weight])
    for gradient in GRADIENTS:
        weight.grad = gradient.clone()
        optimizer.step()
        yield weight.tolist()


def test_sgd_has_the_recipes_momentum_and_decay():
    weight, velocity = [0.3, -0.7], [0.0, 0.0]
    for gradient, found in zip(
        GRADIENTS.tolist(), steps(TrainOptions(lr=0.1, momentum=0.8, weight_decay=0.05)), strict=True
    ):
        for i in (0, 1):
            velocity[i] = 0.8 * velocity[i] + gradient[i] + 0.05 * weight[i]
            weight[i] -= 0.1 * velocity[i]
        assert found == pytest.approx(weight, rel=1e-12)


@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_adams_first_moment_decays_by_the_recipes_momentum(kind):
    train = TrainOptions(optimizer=kind, lr=0.1, momentum=0.5, weight_decay=0.05)
    weight, first, second = [0.3, -0.7], [0.0, 0.0], [0.0, 0.0]
    for step, (gradient, found) in enumerate(zip(GRADIENTS.tolist(), steps(train), strict=True), 1):
        for i in (0, 1):
            slope = gradient[i]
            if kind == "adam":
                slope += 0.05 * weight[i]
            else:
                weight[i] *= 1 - 0.1 * 0.05
            first[i] = 0.5 * first[i] + 0.5 * slope
            second[i] = 0.999 * second[i] + 0.001 * slope**2
            scale = math.sqrt(second[i] / (1 - 0.999**step)) + 1e-8
            weight[i] -= 0.1 * first[i] / (1 - 0.5**step) / scale
        assert found == pytest.approx(weight, rel=1e-9)


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize(("device", "fused"), [("cuda", True), ("cpu", None)])
def test_all_weights_step_in_one_kernel_on_a_gpu(kind, device, fused):
    with FakeTensorMode():  # a GPU's tensors without their memory
        weights = [nn.Parameter(torch.empty(shape, device=device)) for shape in ((4, 3), (4,))]
        optimizer = make_optimizer(TrainOptions(optimizer=kind), weights)
    assert optimizer.defaults["fused"] is fused
    assert len(optimizer.param_groups[0]["params"]) == 2


def test_a_weight_may_get_its_first_gradient_later_than_others(monkeypatch):
    """As DINO's last layer does; PyTorch's fused kernel alone fails there."""
    train = TrainOptions(optimizer="sgd", momentum=0.9, lr=0.1, weight_decay=0.01)
    found = []
    for fused in (True, False):
        monkeypatch.setattr(nn.Parameter, "is_cuda", fused, raising=False)
        first, late = weights = [nn.Parameter(torch.tensor([1.0, 2.0])), nn.Parameter(torch.tensor([3.0]))]
        optimizer = make_optimizer(train, weights)
        assert bool(optimizer.defaults["fused"]) == fused
        for step in range(4):
            optimizer.zero_grad(set_to_none=True)
            (first.square().sum() + (late.square().sum() if step else 0)).backward()
            optimizer.step()
        found.append(torch.cat(weights).detach())
        # Zeros for every weight in every step would be as many kernels as the fused one saves.
        made = Counter()
        with Noted(made):
            optimizer.step()
        assert made["zeros_like"] == 0
    torch.testing.assert_close(*found)


class Noted(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self, counts):
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("participation", "clients", "size"), [(0.25, 10, 3), (0.24, 10, 2), (0.01, 10, 1), (1.0, 7, 7)]
)
def test_a_cohort_is_rounded_to_nearest_with_halves_up(participation, clients, size):
    assert TrainOptions(participation=participation).cohort_size(clients) == size


@pytest.mark.parametrize(
    ("options", "local", "models"),
    [
        ({}, [], []),
        ({"keep_local_models": (2, 9)}, [2], [2]),
        ({"keep_local_models": (1, -1)}, [1, 5], [1, 5]),
        ({"keep_models_every": 2}, [], [2, 4]),
        ({"keep_models_every": 2, "keep_local_models": (-1,)}, [5], [2, 4, 5]),
    ],
)
def test_models_are_kept_of_the_listed_rounds_and_of_every_nth(options, local, models):
    """Of five rounds; −1 is the last."""
    train = TrainOptions(rounds=5, **options)
    assert [round for round in range(1, 6) if train.keeps_local_models(round)] == local
    assert [round for round in range(1, 6) if train.keeps_models(round)] == models


def test_a_loss_weights_a_client_by_its_last_epoch():
    rounds = Rounds("method.name=fed_loss", "train.epochs=3")
    seen = []
    step = rounds.client.step

    def recorded(batch, share):
        seen.append((batch.epoch, float((loss := step(batch, share)).detach())))
        return loss

    rounds.client.step = recorded
    update, _ = rounds.train(0)
    last = [loss for epoch, loss in seen if epoch == 2]
    assert len(last) * 3 == len(seen)
    assert update["loss"] == pytest.approx(sum(last) / len(last), rel=1e-6)
    assert update["loss"] != pytest.approx(sum(loss for _, loss in seen) / len(seen), rel=1e-6)
