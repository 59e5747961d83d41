"""Dec-SSL's linear theory against its own formulas, a slow convex solver and the bounds."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from atoll.core.rng import stream
from atoll.functional import representability
from atoll.functional.skewed_sources import (
    feature_correlations,
    max_margin,
    self_supervised_map,
    skewed_source,
)

DESCENT = {
    "max_iter": 2000,
    "tolerance_grad": 1e-12,
    "tolerance_change": 1e-16,
    "line_search_fn": "strong_wolfe",
}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def moment(x):
    return x.T @ x / len(x)


def test_a_source_has_the_moments_of_the_paper():
    d, K, n = 32, 3, 40_000
    tau, mu = d**0.2, d**-0.2
    x, y = skewed_source(d, K, 1, n, rare=500, generator=generator())
    assert torch.bincount(y, minlength=2 * K).tolist() == [500, 0, n, n, 500, 0]
    own, other = x[y == 2], x[y == 3]
    for samples, sign in ((own, 1), (other, -1)):
        expected = torch.zeros(d, dtype=torch.float64)
        expected[:K] = torch.tensor([-tau / 2, sign, -tau / 2])
        assert torch.allclose(samples.mean(0), expected, atol=5 * tau / n**0.5)
    # E[xxᵀ] of the frequent classes: τ²/2 + μ² for e_i, 1 + μ² for e_k, μ² elsewhere; τ²/4 between two others.
    found = moment(torch.cat([own, other]))
    expected = mu**2 * torch.eye(d, dtype=torch.float64)
    expected[0, 0] += tau**2 / 2
    expected[2, 2] += tau**2 / 2
    expected[1, 1] += 1
    expected[0, 2] = expected[2, 0] = tau**2 / 4
    assert torch.allclose(found, expected, atol=10 * tau**2 / n**0.5)
    rare = x[y == 4].mean(0)
    assert rare[2].item() == pytest.approx(1, abs=5 * mu / 500**0.5)
    assert rare.sum().item() == pytest.approx(1, abs=5 * mu * (d / 500) ** 0.5)


def test_a_source_is_drawn_anew_by_seed_and_must_exist():
    (first, _), (again, _), (other, _) = (
        skewed_source(20, 3, 0, 5, 1, generator(seed)) for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    with pytest.raises(ValueError, match="no source 3 of 3"):
        skewed_source(20, 3, 3, 5, 1, generator())


def test_the_map_minimises_the_self_supervised_objective():
    """By gradient descent on Equation 3.1 itself, its expectation over the augmentation in closed form."""
    x, _ = skewed_source(12, 2, 0, 30, 2, generator())
    X = moment(x)

    def objective(w):
        return -(w @ X @ w.T).trace() + 0.5 * (w.T @ w).square().sum()

    best = self_supervised_map(X, rows=4)
    w = torch.randn(4, 12, dtype=torch.float64, generator=generator(1)).mul_(0.1).requires_grad_()
    optimiser = torch.optim.LBFGS(
        [w], max_iter=2000, tolerance_grad=1e-12, tolerance_change=1e-16, line_search_fn="strong_wolfe"
    )

    def closure():
        optimiser.zero_grad()
        loss = objective(w)
        loss.backward()
        return loss

    optimiser.step(closure)
    assert objective(w).item() == pytest.approx(objective(best).item(), rel=1e-7)
    assert torch.allclose(representability(w.detach()), representability(best), atol=1e-5)
    values = torch.linalg.eigvalsh(X)
    assert objective(best).item() == pytest.approx(-0.5 * values[-4:].square().sum().item(), rel=1e-12)


def test_the_margin_solution_is_that_of_a_general_solver():
    x, y = skewed_source(8, 2, 0, 4, 1, generator(3))
    w = max_margin(x, y, classes=4)

    def margins(flat):
        scores = x.numpy() @ flat.reshape(4, 8).T
        own = scores[np.arange(len(y)), y.numpy()]
        return np.concatenate([own[y.numpy() != c] - scores[y.numpy() != c, c] for c in range(4)]) - 1

    found = minimize(
        lambda flat: 0.5 * flat @ flat,
        np.zeros(32),
        jac=lambda flat: flat,
        constraints={"type": "ineq", "fun": margins},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 1000},
    )
    assert found.success
    assert margins(w.numpy().ravel()).min() > -1e-9
    assert w.square().sum().item() == pytest.approx(2 * found.fun, rel=1e-3)
    assert np.abs(w.numpy() - found.x.reshape(4, 8)).max() < 5e-3


def test_classes_that_cannot_be_separated_are_refused():
    x = torch.tensor([[1.0, 0.0], [2.0, 0.0], [3.0, 0.0]])
    with pytest.raises(ValueError, match="no classifier with margin 1"):
        max_margin(x, torch.tensor([0, 1, 0]), classes=3)
    with pytest.raises(ValueError, match="three classes or more"):
        max_margin(x, torch.tensor([0, 0, 1]), classes=2)


def test_correlations_are_of_the_network_of_least_norm():
    """min ‖uᵀu‖² + ‖vᵀv‖² over all w = vu: gradient descent over the basis A of u, v = w A⁻¹ and u = A."""
    w = torch.randn(3, 3, dtype=torch.float64, generator=generator(5))
    basis = torch.eye(3, dtype=torch.float64).requires_grad_()
    optimiser = torch.optim.LBFGS(
        [basis], max_iter=2000, tolerance_grad=1e-12, tolerance_change=1e-16, line_search_fn="strong_wolfe"
    )

    def closure():
        optimiser.zero_grad()
        v = w @ torch.linalg.inv(basis)
        loss = (basis.T @ basis).square().sum() + (v.T @ v).square().sum()
        loss.backward()
        return loss

    optimiser.step(closure)
    u = basis.detach()
    assert torch.allclose(u.square().sum(0), feature_correlations(w), atol=1e-5)
    assert torch.allclose(w.T @ w, (u.T @ u) @ (u.T @ u), atol=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_the_bounds_hold_with_the_constants_of_the_page(seed):
    """Theorem 3.2 and Proposition 4.1 at d = 100 and 300, with the constants of docs/theory.md."""
    correlations = {}
    for d in (100, 300):
        sources = [skewed_source(d, 3, k, d, 1, stream(seed, "theory", d, k)) for k in range(3)]
        local = [representability(self_supervised_map(moment(x), 6)) for x, _ in sources]
        whole = representability(self_supervised_map(sum(moment(x) for x, _ in sources) / 3, 6))
        least = 1 - 1.86 * d**-0.8
        assert min(r[j] for k, r in enumerate(local) for j in range(3) if j != k) >= least
        assert whole[:3].min() >= least
        assert whole.sum().item() == pytest.approx(6)
        found = [feature_correlations(max_margin(x, y, 6)) for x, y in sources]
        correlations[d] = np.mean([c[j] for k, c in enumerate(found) for j in range(3) if j != k])
        assert min(c[k] for k, c in enumerate(found)) > 0.8
        assert max(c[j] for k, c in enumerate(found) for j in range(3) if j != k) <= 0.237 * d**-0.1
    assert math.log(correlations[300] / correlations[100]) / math.log(3) < -0.1


@pytest.mark.parametrize("y", [[0, 1], [0, 1, 3], [0, 1, -1], [0.0, 1.0, 2.0]])
def test_labels_that_are_no_classes_are_refused(y):
    with pytest.raises(ValueError, match=r"expected a class from 0 to 2 for each row, got x \(3, 2\)"):
        max_margin(torch.randn(3, 2), torch.tensor(y), classes=3)


def test_a_second_moment_is_square():
    with pytest.raises(ValueError, match=r"got second_moment \(3, 4\)"):
        self_supervised_map(torch.ones(3, 4), rows=2)
