import math
from dataclasses import replace

import pytest
import torch

from atoll.components.base import Batch, Objective
from atoll.core.errors import UserError
from atoll.core.tree import clone
from atoll.engines.client import Client
from atoll.methods.method import Method
from atoll.methods.scaffold import Scaffold, effective_steps
from tests.rounds import Rounds
from tests.steps import federation

PLAIN = ("method.name=scaffold", "train.momentum=0.0", "train.weight_decay=0.0")


class Given(Objective):
    """A loss with the gradients that a test names."""

    name = "given"

    def __init__(self, gradients):
        object.__setattr__(self, "gradients", iter(gradients))

    def loss(self, context, batch, passes):
        return context.networks["encoder"].weight.sum() * next(self.gradients)


def scalar_client(gradients, lr, c, c_k, momentum=0.0, round=1, **schedule):
    """A client with one weight, w = 1, and its scope after the given gradients."""
    setting = federation(*PLAIN).setting
    train = replace(setting.train, lr=lr, momentum=momentum, weight_decay=0.0, **schedule)
    setting = replace(setting, train=train)
    networks = torch.nn.ModuleDict({"encoder": torch.nn.Linear(1, 1, bias=False)})
    method = Method(objective=Given(gradients), terms=(Scaffold(),))
    client = Client(method, setting, networks, {})
    one = {"encoder.weight": torch.ones(1, 1)}
    variate, retained = ({"scaffold": {"encoder.weight": torch.full((1, 1), value)}} for value in (c, c_k))
    message = {"client": 0, "round": round, "models": {"global": one}, "parts": variate}
    client.start(message, {"parts": retained}, federation(*PLAIN).client_data(0))
    for _ in range(len(gradients)):
        client.optimizer.zero_grad()
        client.step(Batch(torch.zeros(1), {}, None)).backward()
        client.optimizer.step()
        client.after_step()
    update, retained = client.finish()
    change = update["parts"]["scaffold"]["encoder.weight"].item()
    return (
        update["weights"]["encoder.weight"].item(),
        retained["parts"]["scaffold"]["encoder.weight"].item(),
        change,
    )


def test_the_numbers_of_two_steps():
    y, c_k, change = scalar_client([0.4, 0.3], lr=0.1, c=0.5, c_k=0.2)
    assert y == pytest.approx(0.87)
    assert c_k == pytest.approx(0.35)  # the mean gradient
    assert change == pytest.approx(0.15)


def test_with_momentum_the_variate_is_still_a_mean_of_gradients():
    _, c_k, _ = scalar_client([0.4, 0.3, 0.8], lr=0.1, c=0.5, c_k=0.2, momentum=0.9)
    weights = [1 + 0.9 + 0.81, 1 + 0.9, 1]
    mean = sum(w * g for w, g in zip(weights, [0.4, 0.3, 0.8], strict=True)) / sum(weights)
    assert c_k == pytest.approx(mean, rel=1e-5)
    assert effective_steps(3, 0.9) == pytest.approx(sum(weights))
    assert effective_steps(7, 0.0) == 7


@pytest.mark.parametrize("momentum", [0.0, 0.6])
@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ({"schedule": "cosine", "rounds": 10}, {1: 0.1, 6: 0.05, 9: 0.05 * (1 + math.cos(0.8 * math.pi))}),
        ({"schedule": "step", "rounds": 10, "milestones": (0.5,), "decay": 0.2}, {5: 0.1, 6: 0.02}),
    ],
)
def test_the_variate_is_a_mean_of_gradients_at_any_rate(schedule, rates, momentum):
    """Round by round in a loop: the rate of the round moves w, and c_k⁺ divides by the same rate."""
    gradients, c, c_k = [0.4, 0.3, -0.4], 0.5, 0.2
    for round, rate in rates.items():
        y, velocity, x = 1.0, 0.0, 1.0
        for gradient in gradients:
            velocity = momentum * velocity + gradient - c_k + c
            y -= rate * velocity
        factors = sum(momentum**i for tau in (1, 2, 3) for i in range(tau))
        found = scalar_client(gradients, 0.1, c, c_k, momentum, round=round, **schedule)
        expected = c_k - c + (x - y) / (factors * rate)
        assert found == pytest.approx((y, expected, expected - c_k), rel=1e-4, abs=1e-6)


def test_the_first_round_is_fedavgs():
    """c = c_k = 0: the term adds nothing."""
    scaffold, fedavg = Rounds(*PLAIN), Rounds("method.name=fed_simclr", *PLAIN[1:])
    ours, theirs = scaffold.train(0)[0]["weights"], fedavg.train(0)[0]["weights"]
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_server_adds_a_kth_of_each_change():
    rounds = Rounds(*PLAIN)
    updates, kept = {}, {}
    for client in (0, 2):
        updates[client], kept[client] = rounds.train(client)
    rounds.fold(1, updates)
    c = rounds.server.state["parts"]["scaffold"]
    name = "encoder.conv1.weight"
    expected = (kept[0]["parts"]["scaffold"][name] + kept[2]["parts"]["scaffold"][name]) / 4
    torch.testing.assert_close(c[name], expected)
    # The second round begins from c and the client's own c_k.
    update, again = rounds.train(0, 2, kept[0])
    change = again["parts"]["scaffold"][name] - kept[0]["parts"]["scaffold"][name]
    torch.testing.assert_close(update["parts"]["scaffold"][name], change)


def test_without_a_step_nothing_changes():
    rounds = Rounds(*PLAIN)
    update, _ = rounds.train(0, message={**rounds.message(0, 1), "epochs": 0})
    assert not any(tensor.any() for tensor in update["parts"]["scaffold"].values())


def test_only_weights_that_travel_are_corrected():
    rounds = Rounds(*PLAIN, "method.merge=fedbn")
    update, _ = rounds.train(0)
    assert "encoder.bn1.weight" not in update["parts"]["scaffold"]
    assert "encoder.conv1.weight" in update["parts"]["scaffold"]


def test_adam_is_refused():
    with pytest.raises(UserError, match=r"set train\.optimizer = 'sgd'"):
        federation("method.name=scaffold", "train.optimizer=adam")


def test_a_velocity_from_the_round_before_is_refused():
    """It would count among this round's gradients."""
    kept = ("method.name=scaffold", "train.keep_optimizer=true")
    with pytest.raises(UserError, match=r"set train\.momentum = 0 or train\.keep_optimizer = false"):
        federation(*kept, "train.momentum=0.9")
    federation(*kept, "train.momentum=0")


def test_models_are_averaged_as_control_variates_are():
    """Algorithm 1 averages the sampled clients uniformly, and no sample counts need leave them."""
    rounds = Rounds(*PLAIN, "partition.kind=dirichlet", "partition.alpha=0.5")
    sizes = rounds.federation.partition.sizes
    assert sizes[0] != sizes[1]
    updates = {client: rounds.train(client)[0] for client in (0, 1)}
    assert all("samples" not in update for update in updates.values())
    rounds.fold(1, updates)
    name = "encoder.conv1.weight"
    expected = (updates[0]["weights"][name] + updates[1]["weights"][name]) / 2
    torch.testing.assert_close(rounds.server.state["models"]["global"][name], expected)


def test_another_weight_is_refused():
    with pytest.raises(UserError, match=r"weight is 0\.5, .*set it to 1"):
        federation(*PLAIN, "options.scaffold.weight=0.5")


def test_a_change_that_does_not_fit_is_refused_at_the_door():
    rounds = Rounds(*PLAIN)
    update, _ = rounds.train(0)
    assert rounds.refused(update) is None
    bad = clone(update)
    bad["parts"]["scaffold"]["encoder.conv1.weight"] = torch.zeros(3)
    assert rounds.refused(bad) == (
        "'encoder.conv1.weight' in its slice of 'scaffold' has shape (3,), not (4, 1, 3, 3)"
    )
    del bad["parts"]["scaffold"]["encoder.conv1.weight"]
    assert rounds.refused(bad) == "'encoder.conv1.weight' in its slice of 'scaffold' is missing"
    del bad["parts"]["scaffold"]
    assert rounds.refused(bad) == "its slice of 'scaffold' is missing"
