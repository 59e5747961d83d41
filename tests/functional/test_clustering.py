import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from atoll.functional import assignment_loss, sinkhorn_assignments, swav, swav_codes, swav_scores

from . import oracles
from .oracles import dot, normalised, rows

SCORES = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.8, 0.2], [0.0, 1.0]], dtype=torch.float64)


def test_known():
    expected = torch.tensor([[0.999453, 0.000547], [0.924932, 0.075068], [0.076656, 0.923344], [0.0, 1.0]])
    torch.testing.assert_close(sinkhorn_assignments(SCORES), expected.double(), atol=5e-7, rtol=0)


@pytest.mark.parametrize(("n", "clusters"), [(128, 16), (800, 128), (5, 1)])
def test_balanced_rows_and_columns(n, clusters):
    z, c = (torch.nn.functional.normalize(rows(k, 32, k)).float() for k in (n, clusters))
    assignments = sinkhorn_assignments(z @ c.T)
    torch.testing.assert_close(assignments.sum(dim=1), torch.ones(n))
    torch.testing.assert_close(
        assignments.sum(dim=0), torch.full((clusters,), n / clusters), rtol=0.05, atol=0
    )


def test_a_plan_scales_the_kernel():
    """The result is diag(a)·exp(λS)·diag(b): its log, less λS, is a sum of row and column terms."""
    scores = torch.nn.functional.normalize(rows(6, 3))
    rest = sinkhorn_assignments(scores, lam=3.0).log() - 3.0 * scores
    rest = rest - rest[:1] - rest[:, :1] + rest[0, 0]
    assert float(rest.abs().max()) < 1e-10


@pytest.mark.parametrize("scores", [torch.zeros(3, 2), torch.zeros(1, 4), torch.tensor([[0.0, 900.0]] * 3)])
def test_degenerate_scores_are_finite(scores):
    assignments = sinkhorn_assignments(scores)
    assert assignments.isfinite().all()
    torch.testing.assert_close(assignments.sum(dim=1), torch.ones(len(scores)))


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"scores \(3,\)"):
        sinkhorn_assignments(torch.ones(3))
    with pytest.raises(ValueError, match="iterations must be above 0"):
        sinkhorn_assignments(SCORES, iterations=0)


def test_bad_arguments_of_the_loss_are_named():
    z, centroids = torch.ones(2, 3), torch.eye(3)
    with pytest.raises(ValueError, match=r"got target \(2, 3\) float32, online \(1, 3\)"):
        assignment_loss(z, z[:1], centroids)
    for wrong in (torch.eye(4), torch.ones(0, 3), torch.eye(3).long()):
        with pytest.raises(ValueError, match=r"shape \(M, 3\) with M >= 1, got centroids"):
            assignment_loss(z, z, wrong)
    with pytest.raises(ValueError, match="temperature must be above 0"):
        assignment_loss(z, z, centroids, temperature=0.0)


def test_assignments_agree_with_a_slow_loop():
    target, online, centroids = rows(5, 4, 1), rows(5, 4, 2), torch.nn.functional.normalize(rows(3, 4, 3))

    def assigned(z):
        scores = [dot(normalised(z.tolist()), c) / 0.1 for c in centroids.tolist()]
        total = sum(math.exp(s) for s in scores)
        return [math.exp(s) / total for s in scores]

    losses = [
        -sum(p * math.log(q) for p, q in zip(assigned(t), assigned(o), strict=True))
        for t, o in zip(target, online, strict=True)
    ]
    assert assignment_loss(target, online, centroids).item() == pytest.approx(sum(losses) / 5, rel=1e-12)
    online.requires_grad_()
    assert torch.autograd.gradcheck(lambda z: assignment_loss(target, z, centroids), online)
    target.requires_grad_()
    assignment_loss(target, online, centroids).backward()
    assert target.grad is None  # assignments are constants


def test_assignments_are_taken_in_full_precision():
    target, online, centroids = (rows(8, 16, seed).float() for seed in (1, 2, 3))
    plain = assignment_loss(target, online, centroids)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = assignment_loss(target, online, centroids)
    assert mixed.dtype == torch.float32
    assert torch.equal(mixed, plain)


def test_assignments_of_a_zero_row_are_even():
    centroids = torch.nn.functional.normalize(rows(4, 3))
    zero = torch.zeros(1, 3, dtype=torch.float64, requires_grad=True)
    loss = assignment_loss(zero.detach(), zero, centroids)
    assert loss.item() == pytest.approx(math.log(4))
    loss.backward()
    assert zero.grad.isfinite().all()


@settings(max_examples=20, deadline=None)
@given(n=st.integers(1, 6), k=st.integers(1, 6), iterations=st.integers(1, 4), seed=st.integers(0, 99))
def test_swavs_codes_against_loops(n, k, iterations, seed):
    scores = torch.tanh(rows(n, k, seed))
    expected = oracles.swav_codes(scores, 0.2, iterations)
    torch.testing.assert_close(swav_codes(scores, 0.2, iterations), expected)


def test_swavs_codes_are_balanced_in_the_limit_and_do_not_overflow():
    scores = torch.nn.functional.normalize(rows(40, 8)) @ torch.nn.functional.normalize(rows(4, 8, 1)).T
    codes = swav_codes(scores, iterations=300)
    torch.testing.assert_close(codes.sum(dim=0), torch.full((4,), 10.0, dtype=torch.float64))
    torch.testing.assert_close(codes.sum(dim=1), torch.ones(40, dtype=torch.float64))
    sharp = swav_codes(scores.float(), epsilon=1e-3)
    assert sharp.isfinite().all()
    torch.testing.assert_close(sharp.sum(dim=1), torch.ones(40))


@settings(max_examples=20, deadline=None)
@given(
    views=st.integers(2, 5),
    seen=st.integers(1, 2),
    n=st.integers(1, 4),
    k=st.integers(1, 6),
    seed=st.integers(0, 99),
)
def test_swav_against_loops(views, seen, n, k, seed):
    scores = rows(views * n, k, seed).reshape(views, n, k)
    codes = rows(seen * n, k, seed + 1).softmax(dim=1).reshape(seen, n, k)
    expected = oracles.swav(scores, codes, 0.3)
    assert float(swav(scores, codes, 0.3)) == pytest.approx(expected, rel=1e-9)


def test_swavs_codes_are_constants_and_its_gradient_is_right():
    scores, codes = (
        rows(6, 4).reshape(2, 3, 4).requires_grad_(),
        rows(6, 4, 1).softmax(dim=1).reshape(2, 3, 4),
    )
    codes.requires_grad_()
    assert gradcheck(lambda s: swav(s, codes, 0.5), (scores,))
    swav(scores, codes).backward()
    assert codes.grad is None
    assert not swav_codes(scores[0]).requires_grad


@pytest.mark.parametrize(("views", "seen"), [(1, 1), (2, 3), (2, 0)])
def test_swav_refuses_codes_that_do_not_fit(views, seen):
    with pytest.raises(ValueError, match=r"expected scores \(V, N, K\) and codes \(G, N, K\) with V >= 2"):
        swav(torch.zeros(views, 4, 3), torch.zeros(seen, 4, 3))


def test_swavs_scores_are_cosines_in_full_precision():
    z, c = rows(6, 5).reshape(2, 3, 5), torch.nn.functional.normalize(rows(4, 5, 1))
    expected = [[[dot(normalised(row), p) for p in c.tolist()] for row in view] for view in z.tolist()]
    torch.testing.assert_close(swav_scores(z, c), torch.tensor(expected, dtype=torch.float64))
    with torch.autocast("cpu", torch.bfloat16):
        found = swav_scores(z.float(), c.float())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=0)
    with pytest.raises(ValueError, match=r"expected z \(..., d\) and prototypes \(K, d\)"):
        swav_scores(z, c[:, 1:])
