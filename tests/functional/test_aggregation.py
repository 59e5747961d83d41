import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.functional import angular_divergence, metropolis_weights, min_norm_weights
from atoll.functional.aggregation import shortest_in_hull

from .oracles import dot, normalised, rows, shortest_on_a_grid

GLOBAL = {"a": torch.tensor([1.0, 0.0]).double(), "b": torch.tensor([2.0]).double()}
FIRST = {"a": torch.tensor([1.0, 1.0]).double(), "b": torch.tensor([2.0]).double()}
SECOND = {"a": torch.tensor([0.0, 1.0]).double(), "b": torch.tensor([-1.0]).double()}


def mixed(weights):
    """Σ_k p_k δ_k^(l) w_k^(l), L-DAWA's fold over the two clients of the example."""
    result = {}
    for name in GLOBAL:
        clients = zip(weights, (FIRST, SECOND), strict=True)
        result[name] = sum(p * angular_divergence(GLOBAL, w)[name] * w[name] for p, w in clients).tolist()
    return result


@pytest.mark.parametrize(
    ("weights", "a", "b"),
    [
        ((0.5, 0.5), (0.35355339, 0.35355339), 1.5),
        ((0.75, 0.25), (0.53033009, 0.53033009), 1.75),
        ((0.7310586, 0.2689414), (0.516936, 0.516936), 1.731059),
    ],
)
def test_l_dawa_known(weights, a, b):
    result = mixed(weights)
    assert result["a"] == pytest.approx(a, abs=5e-7)
    assert result["b"] == pytest.approx([b], abs=5e-7)


def test_m_dawa_known():
    whole = [{"model": torch.cat([w["a"], w["b"]])} for w in (GLOBAL, FIRST, SECOND)]
    deltas = [angular_divergence(whole[0], w)["model"] for w in whole[1:]]
    assert [float(x) for x in deltas] == pytest.approx([0.91287093, -0.63245553], abs=5e-9)
    folded = sum(delta * w["model"] for delta, w in zip(deltas, whole[1:], strict=True)) / 2
    # By hand: δ = (√(5/6), −√(2/5)), and (δ₁/2, (δ₁ + δ₂)/2, δ₁ − δ₂/2) with these to 17 digits; .14020758 and
    # 1.22909910, as first noted for this example, are off in the seventh digit.
    assert folded.tolist() == pytest.approx([0.45643546, 0.14020770, 1.22909870], abs=5e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_equal_models_have_cosine_exactly_one(dtype):
    w = {str(s): rows(7, 9, s).to(dtype) for s in range(20)}
    assert all(float(x) == 1.0 for x in angular_divergence(w, w).values())
    minus = {name: -x for name, x in w.items()}
    assert all(float(x) == -1.0 for x in angular_divergence(w, minus).values())


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 999), n=st.integers(1, 5), d=st.integers(1, 5))
def test_angular_divergence_against_loop(seed, n, d):
    w, other = ({"kernel": rows(n, d, s), "bias": rows(1, d, s + 1)[0]} for s in (seed, seed + 5))
    found = angular_divergence(w, other)
    assert found.keys() == w.keys()
    for name, delta in found.items():
        expected = dot(normalised(w[name].flatten().tolist()), normalised(other[name].flatten().tolist()))
        assert float(delta) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_angular_divergence_of_zeros_scalars_and_counters():
    zero, some = torch.zeros(3), torch.ones(3)
    counters = {"seen": torch.tensor(5)}
    assert angular_divergence({"x": zero, **counters}, {"x": some, **counters}) == {"x": 1.0}
    assert angular_divergence({"x": some}, {"x": zero}) == {"x": 1.0}
    assert angular_divergence({"x": zero}, {"x": zero}) == {"x": 1.0}
    assert angular_divergence({"x": torch.tensor(2.0)}, {"x": torch.tensor(-3.0)}) == {"x": -1.0}
    assert angular_divergence({"x": torch.empty(0)}, {"x": torch.empty(0)}) == {"x": 1.0}


def test_angular_divergence_keeps_small_and_large_norms():
    w = rows(1, 50).float()
    for scale in (1e-15, 1e15):
        assert float(angular_divergence({"w": w}, {"w": w * scale})["w"]) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-30, 1e-25, 1e25, 1e37])
def test_angular_divergence_of_entries_whose_squares_float32_cannot_hold(scale, dtype):
    w, other = (rows(1, 40, seed).to(dtype) for seed in (0, 1))
    expected = float(angular_divergence({"w": w.double()}, {"w": other.double()})["w"])
    w, other = ((scale * x.double()).to(dtype) for x in (w, other))
    assert float(angular_divergence({"w": w}, {"w": other})["w"]) == pytest.approx(expected, abs=1e-2)
    assert float(angular_divergence({"w": w}, {"w": w})["w"]) == 1.0


def test_angular_divergence_names_what_differs():
    with pytest.raises(ValueError, match=r"differ in these tensors: \['b'\]"):
        angular_divergence(GLOBAL, {"a": GLOBAL["a"]})
    with pytest.raises(ValueError, match=r"'a' differ: global \(2,\) float64, client \(3,\)"):
        angular_divergence({"a": GLOBAL["a"]}, {"a": torch.ones(3)})


def test_min_norm_weights_known():
    """FedU²'s two clients: normalised, weights (½, ½) and the direction (0.6, 1.8) of twice the mean."""
    unit = torch.nn.functional.normalize(torch.tensor([[3.0, 4.0], [0.0, 2.0]]).double())
    alpha = min_norm_weights(unit)
    assert alpha.tolist() == pytest.approx([0.5, 0.5], abs=1e-12)
    assert (alpha @ (2 * unit)).tolist() == pytest.approx([0.6, 1.8], abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 9999), d=st.integers(1, 4), scale=st.sampled_from([1e-6, 1.0, 1e6]))
def test_min_norm_weights_of_two_have_a_closed_form(seed, d, scale):
    u, v = rows(2, d, seed) * scale
    expected = float(((v - u) @ v / (v - u).square().sum()).clamp(0.0, 1.0))
    assert min_norm_weights(torch.stack([u, v])).tolist() == pytest.approx([expected, 1 - expected], abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 9999),
    k=st.integers(1, 30),
    d=st.integers(1, 30),
    shift=st.floats(0, 2),
    decades=st.sampled_from([0, 1, 6]),
)
def test_min_norm_weights_meet_the_optimality_conditions(seed, k, d, shift, decades):
    """v is shortest in the hull iff ⟨u_k, v⟩ >= ‖v‖² for every k. The lengths spread over many decades."""
    u = (rows(k, d, seed) + shift) * 10 ** (decades * torch.linspace(0, 1, k).double()[:, None])
    alpha = min_norm_weights(u)
    assert float(alpha.min()) >= 0
    assert float(alpha.sum()) == pytest.approx(1.0, abs=1e-12)
    v, lengths = alpha @ u, u.norm(dim=1)
    assert float(((v @ v - u @ v) / lengths).max() / lengths.min()) <= 1e-11


@pytest.mark.parametrize("shift", [0.0, 0.7, 2.0])
@pytest.mark.parametrize("seed", range(4))
def test_min_norm_weights_of_three_against_all_of_a_grid(seed, shift):
    """A grid's best is never shorter, and longer by no more than its step allows."""
    u, steps = rows(3, 3, seed) + shift, 100
    alpha = min_norm_weights(u)
    assert float(alpha.min()) >= 0
    assert float(alpha.sum()) == pytest.approx(1.0, abs=1e-12)
    ours, grid = float((alpha @ u).norm()), shortest_on_a_grid(u, steps)
    assert ours <= grid + 1e-12
    assert grid <= ours + 2 / steps * float(u.norm(dim=1).max())


def test_min_norm_weights_keep_a_tiny_share():
    u = torch.tensor([[1.0, 0.0], [1.0 - 1e-8, 1.0]], dtype=torch.float64)
    assert float(min_norm_weights(u)[1]) == pytest.approx(1e-8, rel=1e-5)


def test_min_norm_weights_of_many_large_directions():
    u = torch.nn.functional.normalize(rows(100, 2000) + 0.05 * torch.ones(2000).double())
    alpha = min_norm_weights(u.float())
    v = alpha.double() @ u
    assert alpha.dtype == torch.float32
    assert float((u @ v).min() - v @ v) >= -1e-6
    assert torch.equal(alpha, min_norm_weights(u.float()))


def test_min_norm_weights_of_degenerate_directions():
    assert min_norm_weights(torch.tensor([[3.0, 4.0]])).tolist() == [1.0]
    assert min_norm_weights(torch.zeros(4, 3)).tolist() == [0.25] * 4
    assert min_norm_weights(torch.ones(4, 3)).tolist() == pytest.approx([0.25] * 4)
    assert min_norm_weights(torch.eye(5)).tolist() == pytest.approx([0.2] * 5)
    assert min_norm_weights(torch.tensor([[1.0], [0.0]])).tolist() == [0.0, 1.0]
    assert min_norm_weights(torch.tensor([[1.0], [2.0]])).tolist() == [1.0, 0.0]
    duplicates = rows(3, 5, 1)[[0, 0, 1, 1, 1, 2]]
    v = min_norm_weights(duplicates) @ duplicates
    torch.testing.assert_close(v, min_norm_weights(rows(3, 5, 1)) @ rows(3, 5, 1))


@pytest.mark.parametrize(
    "bad", [torch.ones(3), torch.ones(0, 3), torch.tensor([[torch.nan]]), torch.ones(2, 2).long()]
)
def test_min_norm_weights_refuses(bad):
    with pytest.raises(ValueError, match=r"directions .*got directions \("):
        min_norm_weights(bad)


def ring(k):
    eye = torch.eye(k, dtype=torch.float64)
    return eye.roll(1, 0) + eye.roll(-1, 0)


def tree(k):
    edges = torch.zeros(k, k, dtype=torch.float64)
    for child in range(1, k):
        parent = (child - 1) // 2
        edges[child, parent] = edges[parent, child] = 1
    return edges


@pytest.mark.parametrize(
    ("graph", "value"),
    [
        (ring(5), 0.53934466),
        (ring(10), 0.87267800),
        (ring(20), 0.96737101),
        (tree(7), 0.93301270),
        (tree(10), 0.95561124),
        (tree(20), 0.98254968),
    ],
)
def test_metropolis_weights_second_eigenvalue(graph, value):
    weights = metropolis_weights(graph)
    assert float(torch.linalg.eigvalsh(weights)[-2]) == pytest.approx(value, abs=5e-9)
    assert torch.equal(weights, weights.T)
    torch.testing.assert_close(weights.sum(dim=0), torch.ones(len(graph), dtype=torch.float64))


def test_metropolis_weights_rows():
    assert metropolis_weights(ring(5))[0].tolist() == pytest.approx([1 / 3, 1 / 3, 0, 0, 1 / 3])
    weights = metropolis_weights(tree(7))
    assert weights[0].tolist() == [0.5, 0.25, 0.25, 0, 0, 0, 0]
    assert weights[1].tolist() == [0.25, 0.25, 0, 0.25, 0.25, 0, 0]
    assert weights[6].tolist() == [0, 0, 0.25, 0, 0, 0, 0.75]


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 999), k=st.integers(1, 8))
def test_metropolis_weights_against_loop(seed, k):
    half = torch.rand(k, k, generator=torch.Generator().manual_seed(seed)) < 0.5
    graph = (half | half.T).fill_diagonal_(False)
    degree = [int(row.sum()) for row in graph]
    weights = metropolis_weights(graph.double()).tolist()
    for i in range(k):
        expected = [1 / (1 + max(degree[i], degree[j])) if graph[i, j] else 0.0 for j in range(k)]
        expected[i] = 1 - sum(expected)
        assert weights[i] == pytest.approx(expected, abs=1e-12)


def test_metropolis_weights_of_complete_and_empty_graphs():
    complete = metropolis_weights(torch.ones(4, 4, dtype=torch.bool))
    torch.testing.assert_close(complete, torch.full((4, 4), 0.25))
    assert torch.equal(metropolis_weights(torch.zeros(3, 3)), torch.eye(3))
    assert torch.equal(metropolis_weights(torch.ones(1, 1)), torch.eye(1))


@pytest.mark.parametrize("bad", [torch.ones(2, 3), torch.ones(4), torch.ones(3, 3).triu(), torch.ones(0, 0)])
def test_metropolis_weights_refuses(bad):
    with pytest.raises(ValueError, match="symmetric adjacency"):
        metropolis_weights(bad)


@pytest.mark.parametrize("bad", [torch.ones(3), torch.ones(2, 3)])
def test_inner_products_that_are_not_square_are_refused(bad):
    with pytest.raises(ValueError, match="expected inner products of shape"):
        shortest_in_hull(bad.double())
