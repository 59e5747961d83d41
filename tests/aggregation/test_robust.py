import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.aggregation import disk_buffer as disk_buffer
from atoll.aggregation.robust import Median, MultiKrum, TrimmedMean
from atoll.core.errors import UserError
from tests.folds import BUFFERS, copies, fold, model, setting
from tests.trees import same

RULES = (Median(), TrimmedMean(0.2), MultiKrum())


def stacked(models, name):
    return np.stack([w[name].double().numpy() for w in models])


def slow_krum(models, byzantine, chosen):
    """The ids that multi-Krum keeps, by loops."""
    flat = [
        torch.cat([tensor.double().flatten() for tensor in w.values() if tensor.is_floating_point()])
        for w in models
    ]
    scores = []
    for i, one in enumerate(flat):
        squares = sorted(float((one - other).square().sum()) for j, other in enumerate(flat) if j != i)
        scores.append((sum(squares[: len(flat) - byzantine - 2]), i))
    return sorted(i for _, i in sorted(scores)[:chosen])


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 999), clients=st.integers(1, 11), trim=st.sampled_from([0.0, 0.1, 0.3, 0.49]))
def test_median_and_trimmed_mean_agree_with_numpy(seed, clients, trim):
    models = [model(seed + k) for k in range(clients)]
    cut = {0.0: 0, 0.1: clients // 10, 0.3: 3 * clients // 10, 0.49: 49 * clients // 100}[trim]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_buffer, "MEMORY", 64 * clients)  # several blocks
        median = fold(Median(), model(0), copies(models))
        trimmed = fold(TrimmedMean(trim), model(0), copies(models))
    for name in ("conv.weight", "conv.bias", "bn.running_mean", "bn.running_var"):
        rows = stacked(models, name)
        assert np.allclose(median[name].numpy(), np.median(rows, axis=0), atol=1e-6)
        kept = np.sort(rows, axis=0)[cut : clients - cut]
        assert np.allclose(trimmed[name].numpy(), kept.mean(axis=0), atol=1e-6)
    assert median["bn.num_batches_tracked"] == models[-1]["bn.num_batches_tracked"]


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 999), clients=st.integers(5, 9), byzantine=st.integers(0, 1), chosen=st.integers(0, 4)
)
def test_multi_krum_agrees_with_a_slow_loop(seed, clients, byzantine, chosen):
    models = [model(seed + k) for k in range(clients)]
    result = fold(MultiKrum(byzantine, chosen), model(0), copies(models))
    kept = slow_krum(models, byzantine, chosen or clients - byzantine)
    for name in ("conv.weight", "bn.running_var"):
        assert np.allclose(result[name].numpy(), stacked(models, name)[kept].mean(axis=0), atol=1e-6)


@pytest.mark.parametrize("rule", [Median(), TrimmedMean(0.2), MultiKrum(1)])
def test_one_wrong_update_of_seven_is_held_off(rule):
    honest = [{"x": torch.tensor([float(k), 1.0])} for k in range(6)]
    wrong = {"x": torch.tensor([1e6, -1e6])}
    result = fold(rule, honest[0], copies([*honest, wrong]))["x"]
    assert 0 <= float(result[0]) <= 5
    assert float(result[1]) == 1


@pytest.mark.parametrize("rule", RULES)
def test_equal_clients_give_themselves_back_to_the_bit(rule):
    w = model(5)
    assert same(fold(rule, model(1), copies([w] * 5)), w)


@settings(max_examples=10, deadline=None)
@given(order=st.permutations(range(5)), rule=st.sampled_from(RULES))
def test_the_order_of_clients_is_rounding(order, rule):
    models = [model(k) for k in range(5)]
    straight = fold(rule, model(9), copies(models))
    mixed = fold(rule, model(9), copies(models[k] for k in order))
    for name in ("conv.weight", "bn.running_mean"):
        assert torch.allclose(straight[name], mixed[name], atol=1e-6)


def test_krum_chooses_the_lower_id_of_equal_scores():
    rows = [{"x": torch.tensor([v])} for v in (3.0, 0.0, 3.0, 0.0, 10.0)]
    assert fold(MultiKrum(1, chosen=1), rows[0], copies(rows))["x"].item() == 3.0


def test_a_trim_that_is_no_binary_number_cuts_what_it_says():
    """0.29 × 100 is 28.999… in binary."""
    rows = [{"x": torch.tensor([1.0 if k < 71 else 1e6])} for k in range(100)]
    assert fold(TrimmedMean(0.29), rows[0], copies(rows))["x"].item() == 1.0


@pytest.mark.parametrize("clients", [1, 2, 3, 4])
def test_a_trim_just_below_a_half_leaves_the_middle(clients):
    rows = [{"x": torch.tensor([float(k)])} for k in range(clients)]
    assert fold(TrimmedMean(0.49999999999), rows[0], copies(rows))["x"].item() == (clients - 1) / 2


def test_too_few_clients_for_krum_are_a_sentence():
    assert MultiKrum(1).refuse(setting(5)) is None
    assert "needs at least 5 updates" in MultiKrum(1).refuse(setting(4))
    assert "needs at least 5 updates" in MultiKrum(1).refuse(setting(8, participation=0.5))


def test_krums_mean_has_no_more_updates_than_may_be_right():
    assert MultiKrum(1, 7).refuse(setting(8)) is None
    assert "chosen is 8, and 1 of 8 updates may be wrong" in MultiKrum(1, 8).refuse(setting(8))
    rows = [
        {"x": torch.tensor([value])} for value in (0.0, 0.1, 0.2, 0.3, 1000.0)
    ]  # of eight, three were lost
    assert fold(MultiKrum(1, 7), rows[0], copies(rows))["x"].item() == pytest.approx(0.15)


def test_bad_options_are_sentences():
    with pytest.raises(UserError, match=r"options\.trimmed_mean\.trim is 0\.5"):
        TrimmedMean(0.5)
    with pytest.raises(UserError, match=r"options\.multi_krum\.byzantine is -1"):
        MultiKrum(-1)


def test_krum_measures_trained_weights_alone():
    """Else whoever sends the mean of the others' statistics lies in the middle, whatever weights it sends."""
    models = [model(k) for k in range(7)]
    for k, weights in enumerate(models):
        weights["bn.running_var"] *= 1000 * k
    trained = [{name: w for name, w in one.items() if not name.startswith("bn.")} for one in models]
    result = fold(MultiKrum(1, chosen=1), model(0), copies(models), buffers=BUFFERS)
    (kept,) = slow_krum(trained, 1, 1)
    assert slow_krum(models, 1, 1) != [kept]
    for name in ("conv.weight", "bn.running_var"):
        assert torch.equal(result[name], models[kept][name])
