"""Balanced soft assignments of samples to clusters (Orchestra, SwAV), and losses that predict them."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.functional._tensors import check_positive, check_rows, check_width, full_precision, shapes, unit
from atoll.functional._views import check_views, entropy_between_views


@full_precision
@torch.no_grad()
def sinkhorn_assignments(scores: Tensor, lam: float = 25.0, iterations: int = 100) -> Tensor:
    """Soft assignments in which every cluster receives the same mass, by Sinkhorn-Knopp scaling.

    P = diag(c)·exp(λS)·diag(r), scaled alternately to column sums N/L and row sums 1. As in Orchestra's code, the
    iteration stops when a full scaling changes the row factors by less than 1 % in total, which is checked at every
    tenth iteration. Column sums are therefore close to N/L, and row sums exactly 1. The assignments are constants:
    no gradient flows.

    Args:
        scores: Similarities of samples to centroids.
        lam: λ, the sharpness.
        iterations: The maximum number of scalings.

    Shape:
        scores: (N, L). Output: (N, L), rows of sum 1.

    Raises:
        ValueError: If `scores` is not (N, L), or a number is not positive.

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
    # The mass of a centroid that is far from every sample underflows to zero; `tiny` avoids the division by zero.
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

    z̄ is z projected onto the unit sphere. The target's assignments are constants.

    Args:
        target: Embeddings of the target network.
        online: Embeddings of the trained network.
        centroids: C, on the unit sphere.
        temperature: T.

    Shape:
        target, online: (N, d); centroids: (G, d). Output: scalar, the mean over rows.

    Raises:
        ValueError: If the shapes do not match or the temperature is not positive.

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
    assigned = (unit(target.detach()) @ centroids.T / temperature).softmax(dim=1)
    log_predicted = (unit(online) @ centroids.T / temperature).log_softmax(dim=1)
    return -(assigned * log_predicted).sum(dim=1).mean()


@full_precision
def swav_scores(z: Tensor, prototypes: Tensor) -> Tensor:
    """Scores of embeddings and prototypes: their cosines, S = z̄ Cᵀ.

    z̄ is z projected onto the unit sphere.

    Args:
        z: Embeddings.
        prototypes: C, on the unit sphere.

    Shape:
        z: (..., d). prototypes: (K, d). Output: (..., K).

    Raises:
        ValueError: If the shapes do not match.

    Reference:
        Caron et al., Unsupervised Learning of Visual Features by Contrasting Cluster Assignments, 2020, Eq. 2.

    Example:
        >>> import torch
        >>> from atoll.functional import swav_scores
        >>> swav_scores(torch.tensor([[3.0, 4.0]]), prototypes=torch.eye(2))
        tensor([[0.6000, 0.8000]])
    """
    if z.ndim < 1 or prototypes.ndim != 2 or z.shape[-1] != prototypes.shape[1]:
        raise ValueError(
            f"expected z (..., d) and prototypes (K, d), got {shapes(z=z, prototypes=prototypes)}"
        )
    return unit(z) @ prototypes.T


@full_precision
@torch.no_grad()
def swav_codes(scores: Tensor, epsilon: float = 0.05, iterations: int = 3) -> Tensor:
    """Codes of a batch: soft assignments to prototypes, all of which get nearly the same mass.

    Q = diag(u) exp(S/ε) diag(v), by Sinkhorn and Knopp's scaling of columns to N/K and then of rows to 1. The codes
    are constants: no gradient flows.

    Args:
        scores: S, cosines of embeddings and prototypes.
        epsilon: ε; a larger one gives smoother codes.
        iterations: Number of scalings of columns and rows.

    Shape:
        scores: (N, K). Output: (N, K), rows of sum 1.

    Raises:
        ValueError: If `scores` is not (N, K), or a number is not positive.

    Reference:
        Caron et al., Unsupervised Learning of Visual Features by Contrasting Cluster Assignments, 2020, Eqs. 3-5.

    Example:
        >>> import torch
        >>> from atoll.functional import swav_codes
        >>> scores = torch.tensor([[1.0, 0.0], [1.0, 0.0]])  # both samples prefer the first prototype
        >>> swav_codes(scores)  # which must not get more than its share
        tensor([[0.5000, 0.5000],
                [0.5000, 0.5000]])
    """
    check_rows(scores=scores)
    check_positive(epsilon=epsilon, iterations=iterations)
    # Common factors of columns and rows cancel, and logarithms neither overflow nor underflow.
    log_q = scores / epsilon
    for _ in range(iterations):
        log_q = log_q.log_softmax(dim=0).log_softmax(dim=1)
    return log_q.exp()


@full_precision
def swav(scores: Tensor, codes: Tensor, temperature: float = 0.1) -> Tensor:
    """SwAV's loss: each view predicts the codes of the others.

    L = mean over the pairs (u, v), u ≠ v, of −(1/N) Σ_i ⟨q_ui, log softmax(s_vi / τ)⟩. The codes are those of the
    first views, the global crops, and are constants.

    Args:
        scores: s, cosines of embeddings and prototypes, of all views.
        codes: q, of the first G views (`swav_codes`).
        temperature: τ.

    Shape:
        scores: (V, N, K), V >= 2. codes: (G, N, K), 1 <= G <= V. Output: scalar.

    Raises:
        ValueError: If the shapes do not match or the temperature is not positive.

    Reference:
        Caron et al., Unsupervised Learning of Visual Features by Contrasting Cluster Assignments, 2020, Eqs. 1, 2
        and 6, as a mean.

    Example:
        >>> import torch
        >>> from atoll.functional import swav
        >>> own = torch.eye(2).expand(2, 2, 2)  # two views of two images, each at a prototype of its own
        >>> round(swav(own, codes=own).item(), 6)
        4.5e-05
    """
    check_views("scores (V, N, K) and codes (G, N, K)", scores=scores, codes=codes)
    check_positive(temperature=temperature)
    return entropy_between_views(codes.detach(), scores / temperature)
