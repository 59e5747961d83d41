import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.aggregation.fedavg import FedAvg
from atoll.aggregation.loss_weighted import LossWeighted
from atoll.aggregation.running_mean import RunningMean
from atoll.core.errors import UserError
from tests.folds import BUFFERS, copies, fold, model, setting
from tests.trees import same


def slow_mean(models, shares):
    """Σ_k p_k w_k of the floating-point tensors, in float64."""
    names = [name for name, tensor in models[0].items() if tensor.is_floating_point()]
    total = math.fsum(shares)
    return {
        name: sum(
            share / total * weights[name].double() for share, weights in zip(shares, models, strict=True)
        )
        for name in names
    }


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999), sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=12))
def test_the_mean_is_weighted_by_samples(seed, sizes):
    models = [model(seed + k) for k in range(len(sizes))]
    result = fold(FedAvg(), model(seed), copies(models), samples=sizes)
    for name, expected in slow_mean(models, sizes).items():
        assert torch.allclose(result[name].double(), expected, rtol=1e-6, atol=1e-6)
    assert result["bn.num_batches_tracked"] == models[-1]["bn.num_batches_tracked"]  # the largest
    assert result["bn.num_batches_tracked"].dtype == torch.int64


@pytest.mark.parametrize("aggregation", [FedAvg(), FedAvg("uniform"), LossWeighted()])
def test_equal_clients_give_themselves_back_to_the_bit(aggregation):
    w = model(7)
    statistics = {"samples": [3, 1, 41], "loss": [0.1, 2.7, 1.3]}
    assert same(fold(aggregation, model(1), copies([w, w, w]), **statistics), w)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 999), order=st.permutations(range(5)))
def test_the_order_of_clients_of_equal_weight_is_rounding(seed, order):
    models = [model(seed + k) for k in range(5)]
    straight = fold(FedAvg("uniform"), model(0), copies(models))
    mixed = fold(FedAvg("uniform"), model(0), copies(models[k] for k in order))
    for name, tensor in straight.items():
        assert torch.allclose(tensor, mixed[name], rtol=1e-5, atol=1e-6)


def test_weights_are_samples_batches_or_nothing():
    one, two = {"x": torch.tensor([0.0])}, {"x": torch.tensor([1.0])}
    numbers = {"samples": [1, 3], "batches": [1, 1]}
    for weights, expected in (("samples", 0.75), ("batches", 0.5), ("uniform", 0.5)):
        result = fold(FedAvg(weights), one, copies([one, two]), **numbers)
        assert result["x"].item() == expected
    assert FedAvg("uniform").statistics == ()
    with pytest.raises(UserError, match=r"options\.fedavg\.weights is 'sampels'; did you mean 'samples'"):
        FedAvg("sampels")


def test_a_tensor_that_some_lack_is_the_mean_of_those_that_have_it():
    mean = RunningMean()
    mean.add({"x": torch.tensor([1.0])}, 1.0)
    mean.add({"x": torch.tensor([3.0]), "y": torch.tensor([5.0])}, 1.0)
    mean.add({"y": torch.tensor([9.0])}, 3.0)
    assert mean.mean["x"].item() == 2
    assert mean.mean["y"].item() == 8


def test_tensors_that_no_client_sends_stay():
    current = model(1)
    sent = [{name: tensor for name, tensor in model(2).items() if name not in BUFFERS}]
    result = fold(FedAvg(), current, copies(sent), samples=[1])
    assert all(torch.equal(result[name], current[name]) for name in BUFFERS)
    assert torch.equal(result["conv.weight"], model(2)["conv.weight"])


def test_without_an_update_the_model_is_the_same_object():
    """By which a server step recognises a model that nobody trained."""
    current = model(1)
    assert FedAvg().open({"global": current}, setting(2), 1, None).close()["global"] is current


def test_losses_one_and_two():
    one, two = {"x": torch.tensor([1.0, 0.0])}, {"x": torch.tensor([0.0, 1.0])}
    result = fold(LossWeighted(), one, copies([one, two]), loss=[1.0, 2.0])
    assert result["x"].tolist() == pytest.approx([0.7310586, 0.2689414], abs=1e-7)


@settings(max_examples=20, deadline=None)
@given(
    losses=st.lists(st.floats(-5, 5), min_size=1, max_size=6),
    shift=st.sampled_from([0.0, -1e4, 1e4, 1e300]),
)
def test_a_common_loss_changes_nothing(losses, shift):
    """Also where exp(−L) by itself would overflow or vanish."""
    models = [model(k) for k in range(len(losses))]
    if shift == 1e300:
        losses = [0.0] * len(losses)  # beside such a loss, the rest is rounding
    result = fold(LossWeighted(), model(0), copies(models), loss=[loss + shift for loss in losses])
    shares = torch.softmax(-torch.tensor(losses, dtype=torch.float64), dim=0).tolist()
    for name, expected in slow_mean(models, shares).items():
        assert torch.allclose(result[name].double(), expected, rtol=1e-5, atol=1e-5)


def test_the_best_client_may_come_last():
    models = [model(k) for k in range(3)]
    result = fold(LossWeighted(), model(0), copies(models), loss=[900.0, 800.0, 1.0])
    assert same({**result, "bn.num_batches_tracked": 0}, {**models[2], "bn.num_batches_tracked": 0})


def test_loss_weighting_says_what_it_needs():
    assert LossWeighted().statistics == ("loss",)
