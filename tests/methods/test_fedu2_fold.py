import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.errors import UserError
from atoll.functional import min_norm_weights
from atoll.methods.fedu2 import EUA
from tests.folds import BUFFERS, copies, fold, model
from tests.trees import same


def test_known_direction():
    """g₁ = (3, 4), g₂ = (0, 2): weights (½, ½), direction (0.6, 1.8), also for two clients."""
    origin = torch.tensor([5.0, 7.0])
    updates = [{"x": origin - torch.tensor(g)} for g in ([3.0, 4.0], [0.0, 2.0])]
    result = fold(EUA(server_lr=1.0), {"x": origin}, copies(updates), samples=[9, 1])
    assert (origin - result["x"]).tolist() == pytest.approx([0.6, 1.8], abs=1e-6)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 999), clients=st.integers(1, 6))
def test_folds_agree_with_the_equations(seed, clients):
    g = model(seed)
    models = [model(seed + 1 + k) for k in range(clients)]
    sizes = [1 + 7 * k for k in range(clients)]
    result = fold(EUA(server_lr=0.3), g, copies(models), buffers=BUFFERS, samples=sizes)
    names = ("conv.weight", "conv.bias")
    flat = [torch.cat([w[n].double().flatten() for n in names]) for w in (g, *models)]
    u = torch.stack([2 * (flat[0] - w) / (flat[0] - w).norm() for w in flat[1:]])
    expected = flat[0] - 0.3 * (min_norm_weights(u) @ u)
    found = torch.cat([result[n].double().flatten() for n in names])
    assert torch.allclose(found, expected, atol=2e-6)
    for name in BUFFERS[:2]:
        mean = sum(n * w[name].double() for n, w in zip(sizes, models, strict=True)) / sum(sizes)
        assert torch.allclose(result[name].double(), mean, atol=1e-6)
    assert result["bn.num_batches_tracked"] == models[-1]["bn.num_batches_tracked"]


def test_clients_that_agree_step_twice_the_rate_and_do_not_meet_at_their_mean():
    g = {"x": torch.zeros(4)}
    w = {"x": torch.tensor([3.0, 0.0, 4.0, 0.0])}
    result = fold(EUA(server_lr=0.1), g, copies([w, w, w]), samples=[1, 2, 3])
    assert torch.allclose(result["x"], 0.2 * w["x"] / 5)


def test_an_opposite_holds_the_model():
    g, w = model(1), model(2)
    opposite = {n: 2 * g[n] - w[n] if w[n].is_floating_point() else w[n] for n in w}
    result = fold(EUA(), g, copies([w, opposite]), buffers=BUFFERS, samples=[1, 1])
    assert torch.allclose(result["conv.weight"], g["conv.weight"], atol=1e-6)


def test_clients_that_stood_still_are_left_out_with_a_warning():
    """Their zero vector is in the hull and the shortest: one of them would hold everyone's model."""
    g, one, two = model(1), model(2), model(3)
    alone = fold(EUA(), g, copies([one, two]), buffers=BUFFERS, samples=[1, 1])
    with pytest.warns(UserWarning, match="'eua' leaves out clients whose trained weights did not change"):
        beside = fold(EUA(), g, copies([one, g, two]), buffers=BUFFERS, samples=[1, 1, 1])
    for name in ("conv.weight", "conv.bias"):
        assert not torch.equal(beside[name], g[name])
        assert torch.equal(beside[name], alone[name])


def test_nothing_is_said_where_no_client_moved(recwarn):
    g = model(1)
    still = fold(EUA(), g, copies([g, g]), buffers=BUFFERS, samples=[1, 1])
    assert same(still, g)
    assert not [str(warning.message) for warning in recwarn if "eua" in str(warning.message)]


def test_only_directions_count():
    g = {"x": torch.zeros(3)}
    one, two = torch.tensor([1.0, 1.0, 0.0]), torch.tensor([0.0, 1.0, 1.0])
    straight = fold(EUA(), g, copies([{"x": one}, {"x": two}]), samples=[1, 1])
    scaled = fold(EUA(), g, copies([{"x": 100 * one}, {"x": 0.01 * two}]), samples=[1, 1])
    assert torch.allclose(straight["x"], scaled["x"], atol=1e-6)
    assert float(straight["x"].norm()) == pytest.approx(0.1 * 2 * math.sqrt(0.75), abs=1e-6)


def test_bad_options_are_sentences():
    with pytest.raises(UserError, match=r"options\.eua\.server_lr is 0"):
        EUA(server_lr=0)
    with pytest.raises(UserError, match=r"options\.eua\.weights is 'loss'"):
        EUA(weights="loss")
