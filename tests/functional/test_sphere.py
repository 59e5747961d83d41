import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from atoll import functional
from atoll.functional import sphere_sliced_uniformity, uniformity, uniformity_decomposition
from atoll.functional.sphere import _sliced_distance, _squared_wasserstein

from . import oracles
from .oracles import rows

A = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
B = torch.tensor([[0.6, 0.8], [0.8, 0.6]], dtype=torch.float64)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of a few rows, so that a small input takes many."""
    monkeypatch.setattr("atoll.functional.sphere.BLOCK", 40)


def test_uniformity_known():
    assert float(uniformity(A)) == pytest.approx(-4.0, rel=1e-12)
    assert float(uniformity(torch.cat([A, B]))) == pytest.approx(-1.0156920, abs=5e-8)


@pytest.mark.parametrize(("d", "infimum"), [(2, -1.57503), (3, -2.07978), (128, -3.93753), (512, -3.98438)])
def test_uniformity_of_the_uniform_sphere(d, infimum):
    assert float(uniformity(rows(3000, d).float())) == pytest.approx(infimum, abs=5e-3)


@settings(max_examples=20, deadline=None)
@given(n=st.integers(2, 9), d=st.integers(1, 5), seed=st.integers(0, 99), t=st.sampled_from([0.5, 2.0, 60.0]))
def test_uniformity_against_loop(n, d, seed, t):
    z = rows(n, d, seed)
    assert float(uniformity(z, t)) == pytest.approx(oracles.uniformity(z, t), rel=1e-9, abs=1e-12)


def test_uniformity_in_blocks(small_blocks):
    z = rows(21, 3).requires_grad_()
    assert uniformity(z).item() == pytest.approx(oracles.uniformity(z.detach(), 2.0), rel=1e-10)
    assert gradcheck(uniformity, (z,))


def test_uniformity_gradient():
    assert gradcheck(uniformity, (rows(6, 3).requires_grad_(),))
    some_equal = rows(4, 3)[[0, 0, 1, 2, 2, 3]].requires_grad_()
    assert gradcheck(uniformity, (some_equal,))


@pytest.mark.parametrize("z", [torch.ones(5, 4), torch.zeros(5, 4), torch.ones(2, 1)])
def test_collapse_is_zero_with_finite_gradient(z):
    z = z.clone().requires_grad_()
    loss = uniformity(z)
    loss.backward()
    assert loss.item() == pytest.approx(0.0, abs=1e-6)
    assert float(z.grad.abs().max()) < 1e-5


def test_uniformity_needs_a_pair():
    with pytest.raises(ValueError, match=r"N >= 2, got z \(1, 3\)"):
        uniformity(torch.ones(1, 3))
    with pytest.raises(ValueError, match="t must be above 0"):
        uniformity(torch.ones(2, 3), t=0.0)


@settings(max_examples=20, deadline=None)
@given(
    n=st.integers(3, 12), clients=st.integers(2, 4), seed=st.integers(0, 99), t=st.sampled_from([0.5, 2.0])
)
def test_decomposition_is_exact(n, clients, seed, t):
    h = rows(n, 3, seed)
    ids = torch.cat([torch.tensor([5, 5, -1]), torch.arange(n - 3) % clients])
    pairs = oracles.potentials(h, t)
    intra = [v for (i, j), v in pairs.items() if ids[i] == ids[j]]
    inter = [v for (i, j), v in pairs.items() if ids[i] != ids[j]]
    parts = uniformity_decomposition(h, ids, t)
    assert float(parts.intra) == pytest.approx(math.log(sum(intra) / len(intra)), rel=1e-10)
    assert float(parts.inter) == pytest.approx(math.log(sum(inter) / len(inter)), rel=1e-10)
    assert float(parts.total) == pytest.approx(float(uniformity(h, t)), rel=1e-10)
    mixed = (len(intra) * parts.intra.exp() + len(inter) * parts.inter.exp()) / len(pairs)
    assert float(mixed.log()) == pytest.approx(float(parts.total), rel=1e-10)


def test_decomposition_identity_of_client_means(small_blocks):
    """[Σ_k 2·C(n_k, 2)·m_kk + 2 Σ_{i<j} n_i n_j m_ij] / (N(N−1)) is the total, over several blocks."""
    h, ids = rows(30, 4), torch.arange(30) % 3
    pairs = oracles.potentials(h, 2.0)
    mean = {}
    for (i, j), value in pairs.items():
        mean.setdefault(tuple(sorted((int(ids[i]), int(ids[j])))), []).append(value)
    total = 0.0
    for (i, j), values in mean.items():
        weight = 10 * 9 if i == j else 2 * 10 * 10
        total += weight * sum(values) / len(values)
    parts = uniformity_decomposition(h, ids)
    assert float(parts.total) == pytest.approx(math.log(total / (30 * 29)), rel=1e-10)


def test_decomposition_says_what_it_lacks():
    h = torch.ones(3, 2)
    with pytest.raises(ValueError, match=r"two clients.*sizes \[3\]"):
        uniformity_decomposition(h, torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match=r"two rows: got sizes \[1, 1, 1\]"):
        uniformity_decomposition(h, torch.arange(3))
    with pytest.raises(ValueError, match=r"client_ids \(2,\)"):
        uniformity_decomposition(h, torch.zeros(2, dtype=torch.long))
    with pytest.raises(ValueError, match="integer client id"):
        uniformity_decomposition(h, torch.zeros(3))
    parts = uniformity_decomposition(torch.zeros(3, 2), torch.tensor([0, 0, 1]))
    assert [float(p) for p in parts] == [0.0, 0.0, 0.0]


def test_squared_wasserstein_of_equispaced_points_to_the_uniform_circle():
    """Four points amid four arcs of a circle of length 1: each arc costs its variance, 1/(12·16)."""
    points = (torch.arange(4).double() + 0.5) / 4
    uniform = (torch.arange(4000).double() + 0.5) / 4000
    assert float(_squared_wasserstein(points.repeat(1000), uniform)) == pytest.approx(0.00520833, abs=1e-7)


def test_sphere_sliced_uniformity_against_loop():
    z = rows(5, 3)
    draws = torch.Generator().manual_seed(3)
    value = sphere_sliced_uniformity(z, draws, projections=4)
    draws.manual_seed(3)
    tangents, samples = torch.randn(5, 3, generator=draws), torch.randn(5, 3, generator=draws)
    directions = torch.randn(5, 4, 3, generator=draws).double()
    u, tangents, samples = (torch.nn.functional.normalize(x.double()) for x in (z, tangents, samples))
    expected = oracles.tangent_transport(u, samples, tangents, directions)
    assert value.item() == pytest.approx(expected, rel=1e-9)


def test_sphere_sliced_uniformity_of_the_samples_themselves_is_zero():
    points, tangents = (torch.nn.functional.normalize(rows(6, 4, s)) for s in (0, 1))
    directions = rows(36, 4, 2).reshape(6, 6, 4)
    assert float(_sliced_distance(points, points.flip(0), tangents, directions)) == pytest.approx(
        0.0, abs=1e-14
    )


def test_sphere_sliced_uniformity_is_drawn_from_its_generator_and_prefers_spread():
    def loss(z, seed=0):
        return float(sphere_sliced_uniformity(z, torch.Generator().manual_seed(seed)))

    spread, collapsed = rows(64, 8).float(), torch.ones(64, 8)
    assert loss(spread) == loss(spread)
    assert loss(spread) != loss(spread, seed=1)
    assert loss(spread) < 0.3 * loss(collapsed)


def test_sphere_sliced_uniformity_gradient_and_degenerate_rows():
    def loss(z):
        return sphere_sliced_uniformity(z, torch.Generator().manual_seed(0))

    assert gradcheck(loss, (rows(5, 3).requires_grad_(),))
    for z in (torch.zeros(4, 3), torch.ones(4, 3), torch.ones(1, 3), torch.ones(4, 1)):
        z = z.clone().requires_grad_()
        value = loss(z)
        value.backward()
        assert value.isfinite()
        assert z.grad.isfinite().all()
    with pytest.raises(ValueError, match=r"z \(3,\)"):
        loss(torch.ones(3))


@pytest.mark.parametrize(
    "loss",
    [
        lambda a, b: functional.alignment(a, b),
        lambda a, b: functional.uniformity(a),
        lambda a, b: functional.nt_xent(a, b),
        lambda a, b: functional.byol(b, a),
        lambda a, b: functional.simsiam(b, a),
        lambda a, b: functional.representation_angle(a, b).sum(),
        lambda a, b: functional.angular_divergence({"w": b}, {"w": a})["w"],
    ],
)
def test_what_is_not_a_number_stays_so(loss) -> None:
    a, b = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
    assert torch.isfinite(loss(a, b))
    a[1, 2] = torch.nan
    assert torch.isnan(loss(a, b))
