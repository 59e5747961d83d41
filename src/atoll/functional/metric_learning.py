"""Losses on Euclidean distances between an anchor, a positive and negatives."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.functional._tensors import check_rows, full_precision


def _distance(a: Tensor, b: Tensor, power: int) -> Tensor:
    """Row-wise ‖a − b‖^power; the norm of equal rows has gradient zero in PyTorch."""
    if power not in (1, 2):
        raise ValueError(f"power must be 1 (distances) or 2 (squared distances), got {power!r}")
    difference = a - b
    return difference.square().sum(dim=1) if power == 2 else torch.linalg.vector_norm(difference, dim=1)


@full_precision
def triplet(a: Tensor, p: Tensor, n: Tensor, margin: float = 1.0) -> Tensor:
    """Triplet loss L = mean [d(a, p) − d(a, n) + m]₊ with Euclidean d.

    Args:
        a: Embeddings of the anchors.
        p: Embeddings of positives: samples of the anchors' classes.
        n: Embeddings of negatives: samples of other classes.
        margin: m.

    Shape:
        a, p, n: (N, d). Output: scalar.

    Raises:
        ValueError: If the shapes differ.

    Reference:
        Schroff et al., FaceNet, 2015, with unsquared distances as in FedQuad's baseline.

    Example:
        >>> import torch
        >>> from atoll.functional import triplet
        >>> a, p, n = torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 4.0]])
        >>> round(triplet(a, p, n, margin=1.0).item(), 4)  # 5 − 4 + 1
        2.0
    """
    check_rows(a=a, p=p, n=n)
    return (_distance(a, p, 1) - _distance(a, n, 1) + margin).relu().mean()


@full_precision
def quadruplet(
    a: Tensor, p: Tensor, n1: Tensor, n2: Tensor, margins: tuple[float, float] = (1.0, 0.5), power: int = 2
) -> Tensor:
    """Quadruplet loss of Chen et al.: the second term pushes the two negatives apart.

    L = mean {[g(a, p)^k − g(a, n₁)^k + m₁]₊ + [g(a, p)^k − g(n₂, n₁)^k + m₂]₊}, g Euclidean, k = `power`. The
    paper's equation squares g, and so does the default; the re-implementations in use have k = 1.

    Args:
        a: Embeddings of the anchors.
        p: Embeddings of positives: samples of the anchors' classes.
        n1: Embeddings of negatives.
        n2: Embeddings of negatives of a third class.
        margins: (m₁, m₂), fixed; the paper adapts them to the batch when it mines hard negatives.
        power: 2 for squared distances, 1 for distances.

    Shape:
        a, p, n1, n2: (N, d). Output: scalar.

    Raises:
        ValueError: If the shapes differ or the power is neither 1 nor 2.

    Reference:
        Chen et al., Beyond Triplet Loss: A Deep Quadruplet Network for Person Re-Identification, 2017.

    Example:
        >>> import torch
        >>> from atoll.functional import quadruplet
        >>> a, p, n1, n2 = torch.tensor([[0.0], [1.0], [1.0], [2.0]]).split(1)
        >>> round(quadruplet(a, p, n1, n2).item(), 4)  # (1 − 1 + 1) + (1 − 1 + 0.5)
        1.5
    """
    check_rows(a=a, p=p, n1=n1, n2=n2)
    positive = _distance(a, p, power)
    first = (positive - _distance(a, n1, power) + margins[0]).relu()
    second = (positive - _distance(n2, n1, power) + margins[1]).relu()
    return (first + second).mean()


@full_precision
def fedquad(
    a: Tensor, p: Tensor, n1: Tensor, n2: Tensor, margins: tuple[float, float] = (1.0, 0.5), power: int = 1
) -> Tensor:
    """FedQuad's quadruplet loss: both terms push the anchor away from a negative.

    L = mean {[d(a, p)^k − d(a, n₁)^k + m₁]₊ + [d(a, p)^k − d(a, n₂)^k + m₂]₊}, d Euclidean, k = `power`.
    Eq. 5 has k = 1. Algorithm 1 has k = 2, which explodes on embeddings that are not normalised.

    Args:
        a: Embeddings of the anchors, not normalised.
        p: Embeddings of positives: samples of the anchors' classes.
        n1: Embeddings of negatives.
        n2: Embeddings of negatives of a third class.
        margins: (m₁, m₂).
        power: 1 for distances, 2 for squared distances.

    Shape:
        a, p, n1, n2: (N, d). Output: scalar.

    Raises:
        ValueError: If the shapes differ or the power is neither 1 nor 2.

    Reference:
        Göksu and Pugeault, FedQuad: Federated Stochastic Quadruplet Learning to Mitigate Data Heterogeneity, 2025,
        Eq. 5.

    Example:
        >>> import torch
        >>> from atoll.functional import fedquad
        >>> a, p, n1, n2 = torch.tensor([[0.0], [1.0], [1.0], [2.0]]).split(1)
        >>> round(fedquad(a, p, n1, n2).item(), 4)  # (1 − 1 + 1) + [1 − 2 + 0.5]₊
        1.0
    """
    check_rows(a=a, p=p, n1=n1, n2=n2)
    positive = _distance(a, p, power)
    first = (positive - _distance(a, n1, power) + margins[0]).relu()
    second = (positive - _distance(a, n2, power) + margins[1]).relu()
    return (first + second).mean()
