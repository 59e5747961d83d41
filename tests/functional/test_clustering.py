import pytest
import torch

from atoll.functional import sinkhorn_assignments

from .oracles import rows

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
