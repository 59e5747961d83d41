import math

import pytest
import torch

from atoll.aggregation.server_steps import Direct, FedAdam, FedAvgM
from atoll.core.errors import UserError
from tests.folds import BUFFERS, model, setting
from tests.harness import final_models, run_tiny
from tests.rounds import Rounds
from tests.trees import same

TRAINED = ("conv.weight", "conv.bias")


def play(step, rounds=4):
    """Some rounds' folds, the models that a step makes of them, and the states."""
    current, state, models, states = model(0), None, [model(0)], []
    folds = [model(k + 1) for k in range(rounds)]
    for folded in folds:
        state, current = step.step(state, current, folded, setting(buffers=BUFFERS))
        models.append(current)
        states.append(state)
    return folds, models, states


def test_fedavgm_agrees_with_a_slow_loop():
    folds, models, _ = play(FedAvgM(server_lr=0.5, momentum=0.8))
    for name in TRAINED:
        w, v = model(0)[name].double(), 0.0
        for folded, found in zip(folds, models[1:], strict=True):
            v = 0.8 * v + (folded[name].double() - w)
            w = w + 0.5 * v
            assert torch.allclose(found[name].double(), w, atol=1e-5)


def test_fedadam_agrees_with_a_slow_loop():
    folds, models, _ = play(FedAdam(server_lr=0.1, beta1=0.9, beta2=0.99, adaptivity=0.01))
    for name in TRAINED:
        for index in range(3):
            w, m, v = float(model(0)[name].flatten()[index]), 0.0, 0.01**2
            for folded, found in zip(folds, models[1:], strict=True):
                delta = float(folded[name].flatten()[index]) - w
                m = 0.9 * m + 0.1 * delta
                v = 0.99 * v + 0.01 * delta**2
                w = w + 0.1 * m / (math.sqrt(v) + 0.01)
                assert float(found[name].flatten()[index]) == pytest.approx(w, abs=1e-5)


@pytest.mark.parametrize("step", [FedAvgM(), FedAdam()])
def test_what_no_gradient_trains_is_taken_as_it_was_folded(step):
    folds, models, states = play(step)
    for folded, found in zip(folds, models[1:], strict=True):
        assert all(torch.equal(found[name], folded[name]) for name in BUFFERS)
    assert all(set(moments) == set(TRAINED) for moments in states[-1].values())


def test_fedavgm_without_momentum_is_fedavg():
    folds, models, _ = play(FedAvgM(momentum=0.0))
    for folded, found in zip(folds, models[1:], strict=True):
        assert all(torch.allclose(found[name], folded[name], atol=1e-6) for name in TRAINED)
    state, after = Direct().step(None, model(0), model(1), setting())
    assert state is None
    assert same(after, model(1))


def test_a_step_leaves_what_it_was_given_alone():
    for step in (FedAvgM(), FedAdam()):
        current, folded = model(0), model(1)
        state, _ = step.step(None, current, folded, setting())
        before = {name: {n: t.clone() for n, t in moments.items()} for name, moments in state.items()}
        step.step(state, current, folded, setting())
        assert same(state, before)
        assert same(current, model(0))
        assert same(folded, model(1))


def test_buffers_are_known_by_module():
    """The federation names them, and the server's state holds moments of everything else."""
    rounds = Rounds("method.name=fedavgm")
    buffers = rounds.federation.setting.buffers
    assert "encoder.bn1.running_var" in buffers
    assert not buffers & {name for name, _ in rounds.federation.networks.named_parameters()}
    update, _ = rounds.train(0)
    rounds.fold(1, {0: update})
    velocity = rounds.server.state["parts"]["fedavgm"]["global"]["velocity"]
    assert set(velocity) == set(update["weights"]) - buffers


@pytest.mark.parametrize("name", ["fedavgm", "fedadam"])
def test_moments_survive_a_resumed_run(name, tmp_path):
    straight = run_tiny(tmp_path / "straight", f"method.name={name}", "train.rounds=3")
    run_tiny(tmp_path / "cut", f"method.name={name}", "train.rounds=1")
    resumed = run_tiny(tmp_path / "cut", f"method.name={name}", "train.rounds=3", resume=True)
    assert same(final_models(resumed), final_models(straight))


def test_bad_options_are_sentences():
    with pytest.raises(UserError, match=r"options\.fedavgm\.momentum is 1"):
        FedAvgM(momentum=1)
    with pytest.raises(UserError, match=r"options\.fedadam\.beta2 is -0\.1"):
        FedAdam(beta2=-0.1)
    with pytest.raises(UserError, match=r"options\.fedadam\.adaptivity is 0"):
        FedAdam(adaptivity=0)
