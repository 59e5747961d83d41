import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from atoll.functional import (
    effective_rank,
    label_distance,
    representability,
    representation_angle,
    weight_distance,
)

from . import oracles
from .oracles import dot, normalised, rows


def test_effective_rank_known():
    assert float(effective_rank(torch.diag(torch.tensor([3.0, 1.0]).double()))) == pytest.approx(
        1.75476535, abs=5e-9
    )
    assert float(effective_rank(torch.eye(6).double())) == pytest.approx(6.0, rel=1e-12)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 999), n=st.integers(1, 6), d=st.integers(1, 5), rank=st.integers(1, 5))
def test_effective_rank_against_loop(seed, n, d, rank):
    h = rows(n, rank, seed) @ rows(rank, d, seed + 1)
    assert float(effective_rank(h)) == pytest.approx(oracles.effective_rank(h), rel=1e-8)


def test_effective_rank_is_of_the_singular_values_alone():
    sigma = torch.tensor([5.0, 2.0, 1.0, 0.25]).double()
    left, right = torch.linalg.qr(rows(30, 4)).Q, torch.linalg.qr(rows(7, 4, 1)).Q
    h = left @ torch.diag(sigma) @ right.T
    p = [s / 8.25 for s in sigma.tolist()]
    expected = math.exp(-sum(x * math.log(x) for x in p))
    assert float(effective_rank(h)) == pytest.approx(expected, rel=1e-10)
    assert float(effective_rank(1e-8 * h)) == pytest.approx(expected, rel=1e-10)


def test_effective_rank_does_not_centre():
    assert float(effective_rank(torch.ones(9, 4) + torch.eye(9, 4))) > 1.0
    assert float(effective_rank(torch.ones(9, 4))) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("measure", [effective_rank, representability])
def test_a_decomposition_of_what_is_not_finite_is_refused(measure, bad):
    h = torch.ones(4, 3)
    h[1, 2] = bad
    with pytest.raises(ValueError, match=r"[hw] must be finite, got [hw] \(4, 3\) float32 with other values"):
        measure(h)


def test_effective_rank_gradients():
    assert gradcheck(effective_rank, (rows(6, 4).requires_grad_(),))
    for h in (torch.zeros(3, 4), torch.ones(3, 4), torch.ones(1, 4), torch.eye(4)):
        h = h.clone().requires_grad_()
        value = effective_rank(h)
        value.backward()
        assert value.isfinite()
        assert h.grad.isfinite().all()
    assert float(effective_rank(torch.zeros(3, 4))) == 0.0
    assert float(effective_rank(torch.ones(1, 4))) == 1.0


def test_representation_angle_against_loop():
    h1, h2 = rows(6, 4), rows(6, 4, 1)
    pairs = zip(h1.tolist(), h2.tolist(), strict=True)
    expected = [math.degrees(math.acos(dot(normalised(a), normalised(b)))) for a, b in pairs]
    assert representation_angle(h1, h2).tolist() == pytest.approx(expected, rel=1e-10)


def test_representation_angle_of_special_rows():
    h1 = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    h2 = torch.tensor([[2.0, 0.0], [-1.0, 0.0], [1e-5, 1.0], [1.0, 0.0], [0.0, 0.0]])
    assert representation_angle(h1, h2).tolist() == pytest.approx([0.0, 180.0, 89.99943, 90.0, 90.0])
    small = torch.tensor([[1.0, 1e-6]])
    assert float(representation_angle(h1[:1], small)) == pytest.approx(math.degrees(1e-6), rel=1e-5)


def test_representation_angle_gradients():
    h1, h2 = rows(4, 3).requires_grad_(), rows(4, 3, 1).requires_grad_()
    assert gradcheck(representation_angle, (h1, h2))
    for other in (torch.ones(2, 3), -torch.ones(2, 3), torch.zeros(2, 3)):
        h = torch.ones(2, 3, requires_grad=True)
        representation_angle(h, other).sum().backward()
        assert h.grad.isfinite().all()
    h = torch.zeros(2, 3, requires_grad=True)
    representation_angle(h, torch.zeros(2, 3)).sum().backward()
    assert h.grad.isfinite().all()


def test_weight_distance_sums_over_tensors():
    w1 = {"a": torch.tensor([[3.0, 0.0]]), "b": torch.tensor([1.0, 1.0]), "seen": torch.tensor(9)}
    w2 = {"a": torch.tensor([[0.0, 4.0]]), "b": torch.tensor([1.0, 3.0]), "seen": torch.tensor(2)}
    assert float(weight_distance(w1, w2)) == pytest.approx(7.0)
    a, b = rows(2, 3).requires_grad_(), rows(2, 3, 1)
    assert gradcheck(lambda x: weight_distance({"a": x, "b": b}, {"a": b, "b": 2 * b}), (a,))


def test_weight_distance_against_loop():
    w1, w2 = ({str(k): rows(k + 1, 3, seed + k) for k in range(3)} for seed in (0, 9))
    expected = 0.0
    for name, a in w1.items():
        pairs = zip(a.flatten().tolist(), w2[name].flatten().tolist(), strict=True)
        expected += math.sqrt(sum((x - y) ** 2 for x, y in pairs))
    assert float(weight_distance(w1, w2)) == pytest.approx(expected, rel=1e-12)


def test_weight_distance_of_a_model_to_itself_has_a_gradient():
    a = torch.ones(3, requires_grad=True)
    distance = weight_distance({"a": a}, {"a": torch.ones(3)})
    distance.backward()
    assert distance.item() == 0.0
    assert float(a.grad.abs().max()) == 0.0


def test_weight_distance_names_what_differs():
    w = {"a": torch.ones(2)}
    with pytest.raises(ValueError, match=r"differ in these tensors: \['b'\]"):
        weight_distance(w, {**w, "b": torch.ones(2)})
    with pytest.raises(ValueError, match=r"'a' differ: w1 \(2,\) float32, w2 \(3,\)"):
        weight_distance(w, {"a": torch.ones(3)})
    with pytest.raises(ValueError, match="no tensor"):
        weight_distance({}, {})


def test_representability_known():
    w = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 2.0]]).double()
    assert representability(w).tolist() == pytest.approx([0.5, 0.5, 1.0], abs=1e-12)


@pytest.mark.parametrize("copies", [1, 4])
def test_representability_of_one_direction(copies):
    """The row space of equal rows is a line: r_i = w_i² / ‖w‖²."""
    (w,) = rows(1, 5).tolist()
    expected = [x * x / dot(w, w) for x in w]
    assert representability(torch.tensor([w] * copies).double()).tolist() == pytest.approx(expected, rel=1e-6)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 999), m=st.integers(1, 6), d=st.integers(1, 5), rank=st.integers(1, 5))
def test_representability_against_loop(seed, m, d, rank):
    w = rows(m, rank, seed) @ rows(rank, d, seed + 1)
    assert representability(w).tolist() == pytest.approx(oracles.representability(w), abs=1e-8)


def test_representability_is_the_diagonal_of_the_projector():
    basis = torch.linalg.qr(rows(9, 3)).Q
    w = rows(5, 3, 1) @ torch.diag(torch.tensor([1.0, 1e-3, 1e3]).double()) @ basis.T
    r = representability(w)
    torch.testing.assert_close(r, (basis @ basis.T).diagonal())
    assert float(r.sum()) == pytest.approx(3.0, rel=1e-9)
    assert float(representability(torch.zeros(2, 4)).abs().max()) == 0.0
    assert float(representability(w.float()).sum()) == pytest.approx(3.0, rel=1e-4)


def test_representability_of_the_papers_construction():
    """Appendix E at d = 100, K = 3, m = 6: every informative axis is kept by local and global objectives."""
    d, k, m, n = 100, 3, 6, 4000
    tau, mu = d**0.2, d**-0.2
    generator = torch.Generator().manual_seed(0)

    def client(index):
        signs = torch.where(torch.arange(n) % 2 == 0, 1.0, -1.0).double()
        x = mu * torch.randn(n, d, generator=generator, dtype=torch.float64)
        x[:, index] += signs
        for other in range(k):
            if other != index:
                x[:, other] -= tau * torch.randint(0, 2, (n,), generator=generator)
        return x.T @ x / n

    covariances = [client(i) for i in range(k)]
    for covariance in (*covariances, torch.stack(covariances).mean(dim=0)):
        r = representability(torch.linalg.eigh(covariance).eigenvectors[:, -m:].T)
        assert float(r[:k].min()) > 0.99
        assert float(r.sum()) == pytest.approx(m, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.float64])
def test_label_distance_known(dtype):
    pairs = torch.zeros(5, 10, dtype=dtype)
    for client in range(5):
        pairs[client, 2 * client : 2 * client + 2] = 500
    assert float(label_distance(pairs)) == pytest.approx(1.6)
    assert float(label_distance(700 * torch.eye(10, dtype=dtype))) == pytest.approx(1.8)
    assert float(label_distance(torch.full((5, 10), 30, dtype=dtype))) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(("beta", "value"), [(0.7, 0.48), (0.5, 0.80), (0.3, 1.12), (0.0, 1.6)])
def test_label_distance_of_beta_skewness(beta, value):
    counts = torch.full((5, 10), beta * 100)
    for client in range(5):
        counts[client, 2 * client : 2 * client + 2] += (1 - beta) * 500
    assert float(label_distance(counts)) == pytest.approx(value, rel=1e-5)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.lists(st.integers(0, 50), min_size=3, max_size=3).filter(any), min_size=1, max_size=6))
def test_label_distance_against_loop(counts):
    total = sum(map(sum, counts))
    overall = [sum(client[c] for client in counts) / total for c in range(3)]
    distances = [sum(abs(client[c] / sum(client) - overall[c]) for c in range(3)) for client in counts]
    expected = sum(distances) / len(counts)
    assert float(label_distance(torch.tensor(counts))) == pytest.approx(expected, abs=1e-6)
    assert len(counts) > 1 or expected == 0


def test_label_distance_weighs_clients_alike_and_leaves_out_the_empty():
    counts = torch.tensor([[90, 0], [0, 10], [0, 100], [0, 0]])
    assert float(label_distance(counts)) == pytest.approx((1.1 + 0.9 + 0.9) / 3)


@pytest.mark.parametrize("bad", [torch.ones(3), torch.zeros(2, 2), torch.tensor([[1, -1]]), torch.ones(0, 2)])
def test_label_distance_refuses(bad):
    with pytest.raises(ValueError, match=r"got counts \("):
        label_distance(bad)


@pytest.mark.parametrize(
    "call",
    [
        lambda: effective_rank(torch.ones(3)),
        lambda: effective_rank(torch.ones(0, 3)),
        lambda: representation_angle(torch.ones(2, 3), torch.ones(2, 4)),
        lambda: representability(torch.ones(3)),
    ],
)
def test_bad_shapes_are_named(call):
    with pytest.raises(ValueError, match=r"expected .* got .*\("):
        call()
