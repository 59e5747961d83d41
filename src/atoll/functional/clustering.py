"""Balanced soft assignment to clusters."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.functional._tensors import check_positive, check_rows, check_width, full_precision, unit


@full_precision
@torch.no_grad()
def sinkhorn_assignments(scores: Tensor, lam: float = 25.0, iterations: int = 100) -> Tensor:
    """Soft assignments in which every cluster gets the same mass, by Sinkhorn-Knopp scaling.

    P = diag(c)·exp(λS)·diag(r), scaled in turn to column sums N/L and row sums 1. As in Orchestra's code it
    stops when a full scaling changes the rows' factors by less than 1 % in all, looking at every tenth
    iteration, so columns come out close to N/L and rows exactly 1. The targets are constants: no gradient
    flows.

    Args:
        scores: similarities of samples to centroids.
        lam: λ, the sharpness.
        iterations: the most scalings that are done.

    Shape:
        scores: (N, L). Output: (N, L), rows of sum 1.

    Raises:
        ValueError: if `scores` is not (N, L), or a number is not positive.

    Reference:
        Lubana et al., Orchestra: Unsupervised Federated Learning via Globally Consistent Clustering, 2022
        (released code); Cuturi, Sinkhorn Distances, 2013.

    Example:
        >>> import torch
        >>> from atoll.functional import sinkhorn_assignments
        >>> scores = torch.tensor([[1.0, 0.0], [1.0, 0.0]])  # both samples prefer the first cluster
        >>> sinkhorn_assignments(scores).round(decimals=3)  # which must not get more than its share
        tensor([[0.5000, 0.5000],
                [0.5000, 0.5000]])
    """
    check_rows(scores=scores)
    check_positive(lam=lam, iterations=iterations)
    n, clusters = scores.shape
    kernel = (scores * lam).softmax(dim=1)
    # A centroid that is far from every sample would underflow to a division by zero.
    tiny = torch.finfo(scores.dtype).tiny
    c = scores.new_full((n,), 1.0 / n)
    for i in range(iterations):
        r = 1.0 / (clusters * (c @ kernel)).clamp_min(tiny)
        previous, c = c, 1.0 / (n * (kernel @ r)).clamp_min(tiny)
        if i % 10 == 0 and bool((previous / c - 1.0).abs().sum() < 1e-2):
            break
    assignments = kernel * c[:, None] * r * n
    return assignments / assignments.sum(dim=1, keepdim=True)


@full_precision
def assignment_loss(target: Tensor, online: Tensor, centroids: Tensor, temperature: float = 0.1) -> Tensor:
    """Cross-entropy between two networks' soft assignments to centroids, −⟨softmax(z̄ᵗCᵀ/T), log softmax(z̄Cᵀ/T)⟩.

    z̄ is z on the unit sphere. The target's assignments are constants.

    Args:
        target: the target's embeddings.
        online: those of the network that learns.
        centroids: C, on the unit sphere.
        temperature: T.

    Shape:
        target, online: (N, d); centroids: (G, d). Output: scalar, the mean over rows.

    Raises:
        ValueError: shapes that do not fit, or a temperature that is not positive.

    Reference:
        Lubana et al., Orchestra: Unsupervised Federated Learning via Globally Consistent Clustering, 2022.

    Example:
        >>> import torch
        >>> from atoll.functional import assignment_loss
        >>> z = torch.tensor([[1.0, 0.0]])
        >>> round(assignment_loss(z, z, centroids=torch.eye(2), temperature=1.0).item(), 4)
        0.5822
    """
    check_rows(target=target, online=online)
    check_width(target, least=1, centroids=centroids)
    check_positive(temperature=temperature)
    given = (unit(target.detach()) @ centroids.T / temperature).softmax(dim=1)
    said = (unit(online) @ centroids.T / temperature).log_softmax(dim=1)
    return -(given * said).sum(dim=1).mean()
