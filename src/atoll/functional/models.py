"""Measures of several models, given as rows of weights: their consensus, and the plane of a trajectory."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.functional._tensors import check_finite, check_rows, full_precision, shapes


@full_precision
@torch.no_grad()
def consensus_distance(models: Tensor) -> Tensor:
    """Root mean square distance of models from their mean: sqrt((1/K) Σ_k ‖w_k − w̄‖²), w̄ = (1/K) Σ_k w_k.

    Args:
        models: The flattened weights of each model.

    Shape:
        models: (K, D). Output: scalar.

    Raises:
        ValueError: If `models` is not (K, D).

    Reference:
        Kong et al., Consensus Control for Decentralized Deep Learning, 2021, Eq. 3.

    Example:
        >>> import torch
        >>> from atoll.functional import consensus_distance
        >>> consensus_distance(torch.tensor([[3.0, 0.0], [-3.0, 0.0]])).item()
        3.0
    """
    check_rows(models=models)
    return (models - models.mean(dim=0)).square().sum(dim=1).mean().sqrt()


@torch.no_grad()
def spectral_gap(weights: Tensor) -> Tensor:
    """Spectral gap of symmetric mixing weights: 1 − max(|λ_2|, |λ_K|), the eigenvalues in descending order.

    The distance from consensus shrinks at least by the factor 1 − gap in a gossip step. The gap of a graph that is
    not connected is 0, and that of a single model is 1.

    Args:
        weights: Symmetric doubly stochastic W.

    Shape:
        weights: (K, K). Output: scalar.

    Raises:
        ValueError: If `weights` is not square or not symmetric.

    Reference:
        Boyd et al., Randomized Gossip Algorithms, 2006.

    Example:
        >>> import torch
        >>> from atoll.functional import spectral_gap
        >>> spectral_gap(torch.full((4, 4), 0.25)).item()  # every model becomes the mean
        1.0
        >>> spectral_gap(torch.eye(4)).item()  # no model changes
        0.0
    """
    square = weights.ndim == 2 and weights.shape[0] == weights.shape[1] > 0
    if not square or not torch.allclose(weights, weights.T):
        raise ValueError(f"expected symmetric weights (K, K), got {shapes(weights=weights)}")
    if len(weights) == 1:
        return torch.ones((), dtype=weights.dtype)
    eigenvalues = torch.linalg.eigvalsh(weights.double())
    gap = 1 - torch.maximum(eigenvalues[0].abs(), eigenvalues[-2].abs())
    return gap.clamp(0, 1).to(weights.dtype)


@full_precision
@torch.no_grad()
def trajectory_plane(models: Tensor) -> tuple[Tensor, Tensor]:
    """Plane through the last model that contains most of a trajectory: its first two principal components.

    With the rows w_t − w_T as X = UΣVᵀ, the directions are the first two rows of Vᵀ and the coordinates XV. The
    last model is the origin. The sign of a direction is that of its largest coordinate.

    Args:
        models: The flattened weights of the models, in the order of the trajectory; at least 2.

    Shape:
        models: (T, D), T at least 2 and D at least 2. Output: (2, D) orthonormal (a direction that the trajectory
        does not use is zero), (T, 2).

    Raises:
        ValueError: If `models` is not (T, D), or not finite, or T or D is below 2.

    Reference:
        Li et al., Visualizing the Loss Landscape of Neural Nets, 2018, Section 7.

    Example:
        >>> import torch
        >>> from atoll.functional import trajectory_plane
        >>> directions, places = trajectory_plane(torch.tensor([[4.0, 0.0, 1.0], [2.0, 0.0, 1.0], [0.0, 0.0, 1.0]]))
        >>> directions[0].tolist(), places[1].tolist()
        ([1.0, 0.0, 0.0], [2.0, 0.0])
    """
    check_rows(models=models)
    if min(models.shape) < 2:
        raise ValueError(f"expected at least 2 models of at least 2 weights, got {shapes(models=models)}")
    check_finite(models=models)
    steps = models - models[-1]
    _, lengths, directions = torch.linalg.svd(steps, full_matrices=False)
    used = lengths > lengths[0] * max(steps.shape) * torch.finfo(models.dtype).eps
    directions = (directions * used[:, None])[:2]
    places = steps @ directions.T
    largest = places.gather(0, places.abs().argmax(dim=0, keepdim=True)).squeeze(0)
    signs = torch.where(largest < 0, -1.0, 1.0).to(models.dtype)
    return directions * signs[:, None], places * signs
