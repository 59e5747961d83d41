import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.aggregation.fedavg import FedAvg
from atoll.aggregation.update_geometry import Reference
from atoll.core.errors import UserError
from atoll.methods.ldawa import LDAWA, MDAWA
from tests.folds import BUFFERS, copies, fold, model, setting
from tests.trees import same

GLOBAL = {"a": torch.tensor([1.0, 0.0]), "b": torch.tensor([2.0])}
FIRST = {"a": torch.tensor([1.0, 1.0]), "b": torch.tensor([2.0])}
SECOND = {"a": torch.tensor([0.0, 1.0]), "b": torch.tensor([-1.0])}
CLIENTS = {"samples": [3, 1], "loss": [1.0, 2.0]}


def cosine(x, y):
    lengths = float(x.norm() * y.norm())
    return min(float(x @ y) / lengths, 1.0) if lengths else 1.0


def slow(g, models, shares, whole=False, skip=(), absolute=False):
    """Σ_k p_k δ_k w_k by the equations, in float64."""
    names = [name for name, tensor in g.items() if tensor.is_floating_point()]
    flat = [{name: w[name].double().flatten() for name in names} for w in (g, *models)]
    result = {}
    for name in names:
        components = [n for n in names if n not in skip] if whole else [name]
        deltas = [
            1.0
            if name in skip
            else cosine(torch.cat([flat[0][n] for n in components]), torch.cat([w[n] for n in components]))
            for w in flat[1:]
        ]
        pairs = list(zip(shares, deltas, strict=True))
        total = sum(p * abs(d) for p, d in pairs) if absolute else sum(shares)
        result[name] = sum(p * d / total * w[name].double() for (p, d), w in zip(pairs, models, strict=True))
    return result


@pytest.mark.parametrize(
    ("aggregation", "a", "b"),
    [
        (LDAWA(), [0.35355339, 0.35355339], 1.5),
        (LDAWA("samples"), [0.53033009, 0.53033009], 1.75),
        (LDAWA("loss"), [0.516936, 0.516936], 1.731059),
        (MDAWA(), [0.45643546, 0.14020770], 1.22909870),
    ],
)
def test_known_numbers(aggregation, a, b):
    result = fold(aggregation, GLOBAL, copies([FIRST, SECOND]), **CLIENTS)
    assert result["a"].tolist() == pytest.approx(a, abs=6e-7)
    assert result["b"].tolist() == pytest.approx([b], abs=6e-7)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 999),
    spread=st.sampled_from([0.1, 1.0, 30.0]),
    weights=st.sampled_from(["uniform", "samples", "batches", "loss"]),
    whole=st.booleans(),
    include_buffers=st.booleans(),
    renormalise=st.booleans(),
)
def test_folds_agree_with_the_equations(seed, spread, weights, whole, include_buffers, renormalise):
    g = model(seed)
    models = [model(seed + 1 + k) for k in range(5)]
    models = [
        {n: (g[n] + spread * w[n]).to(g[n].dtype) if w[n].is_floating_point() else w[n] for n in w}
        for w in models
    ]
    numbers = {"samples": [5, 1, 30, 2, 9], "batches": [2, 1, 4, 1, 3], "loss": [0.5, 3.0, -1.0, 0.2, 0.9]}
    shares = {
        "uniform": [0.2] * 5,
        "samples": [n / 47 for n in numbers["samples"]],
        "batches": [n / 11 for n in numbers["batches"]],
        "loss": torch.softmax(-torch.tensor(numbers["loss"], dtype=torch.float64), 0).tolist(),
    }[weights]
    kind = MDAWA if whole else LDAWA
    aggregation = kind(weights, include_buffers=include_buffers, renormalise=renormalise)
    result = fold(aggregation, g, copies(models), buffers=BUFFERS, **numbers)
    expected = slow(g, models, shares, whole, () if include_buffers else BUFFERS, renormalise)
    for name, tensor in expected.items():
        assert torch.allclose(result[name].double(), tensor, rtol=1e-4, atol=2e-5 * (1 + spread))
    assert result["bn.num_batches_tracked"] == models[-1]["bn.num_batches_tracked"]


@pytest.mark.parametrize(
    "aggregation", [LDAWA(), LDAWA("samples"), LDAWA("loss"), MDAWA(), LDAWA(renormalise=True)]
)
def test_clients_that_did_not_move_leave_the_model_as_it_is(aggregation):
    numbers = {"samples": [3, 1, 41], "loss": [0.1, 2.7, 1.3]}
    g = model(3)
    assert same(fold(aggregation, g, copies([g, g, g]), **numbers), g)


def test_the_opposite_of_the_model_counts_as_the_model():
    minus = {name: -tensor for name, tensor in GLOBAL.items()}
    for aggregation in (LDAWA(), MDAWA()):
        result = fold(aggregation, GLOBAL, copies([minus, GLOBAL]))
        for name, tensor in GLOBAL.items():
            assert torch.allclose(result[name], tensor, atol=1e-6)


def test_scaling_a_client_scales_what_it_adds():
    alone, scaled = (
        fold(LDAWA(), GLOBAL, copies([{n: c * x for n, x in FIRST.items()}]))["a"] for c in (1.0, 8.0)
    )
    assert torch.allclose(scaled, 8 * alone)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 999))
def test_the_model_is_no_longer_than_the_clients_are_on_average(seed):
    models = [model(seed + k) for k in range(4)]
    result = fold(LDAWA(), model(seed + 9), copies(models))
    for name in ("conv.weight", "conv.bias"):
        assert float(result[name].norm()) <= sum(float(w[name].norm()) for w in models) / 4 + 1e-6


def test_a_tensor_of_zeros_has_no_angle():
    """BatchNorm's β and running mean begin as zeros."""
    g = {"bias": torch.zeros(3), "w": torch.ones(3)}
    w = {"bias": torch.tensor([1.0, 2.0, 3.0]), "w": torch.zeros(3)}
    result = fold(LDAWA(), g, copies([w, w]))
    assert torch.equal(result["bias"], w["bias"])
    assert torch.equal(result["w"], w["w"])


def test_a_tensor_that_clients_do_not_send_is_unchanged():
    g = {**GLOBAL, "kept": torch.tensor([7.0])}
    result = fold(LDAWA(), g, copies([FIRST, SECOND]))
    assert result["kept"].tolist() == [7.0]
    assert result["b"].tolist() == pytest.approx([1.5])


def test_clients_that_are_all_orthogonal_leave_nothing():
    g = {"x": torch.tensor([1.0, 0.0])}
    w = {"x": torch.tensor([0.0, 1.0])}
    assert fold(LDAWA(), g, copies([w, w]))["x"].tolist() == pytest.approx([0, 0], abs=1e-6)


def test_warm_up_rounds_are_fedavg_by_samples():
    aggregation = LDAWA(warmup_rounds=3)
    assert aggregation.statistics == ("samples",)
    assert LDAWA().statistics == ()
    assert LDAWA("loss", warmup_rounds=1).statistics == ("loss", "samples")
    plain = fold(FedAvg(), GLOBAL, copies([FIRST, SECOND]), **CLIENTS)
    for round, expected in ((1, plain), (3, plain), (4, fold(LDAWA(), GLOBAL, copies([FIRST, SECOND])))):
        assert same(fold(aggregation, GLOBAL, copies([FIRST, SECOND]), round=round, **CLIENTS), expected)


def test_the_doors_measure_is_used():
    """What the server measured at the door is not measured again, and gives the same bits."""
    g, w = model(1), model(2)
    expected = fold(LDAWA(), g, copies([w]))
    opened = LDAWA().open({"global": g}, setting(), 1, None)
    opened.add(0, {"weights": copies([w])[0]}, Reference(g).measure(w))
    assert same(opened.close()["global"], expected)
    turned = LDAWA().open({"global": g}, setting(), 1, None)
    turned.add(0, {"weights": copies([w])[0]}, Reference(w).measure(w))
    assert torch.equal(turned.close()["global"]["conv.weight"], w["conv.weight"])


def test_bad_options_are_sentences():
    with pytest.raises(UserError, match=r"options\.l_dawa\.weights is 'lost'"):
        LDAWA("lost")
    with pytest.raises(UserError, match=r"options\.m_dawa\.warmup_rounds is -1"):
        MDAWA(warmup_rounds=-1)
