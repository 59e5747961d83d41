"""Losses on the correlation matrix of embedding dimensions."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from atoll.functional._tensors import (
    check_rows,
    full_precision,
    off_diagonal_squares,
    shapes,
    standardise,
    zero_loss,
)


@full_precision
def barlow_twins(z1: Tensor, z2: Tensor, lambd: float = 0.0051, unbiased: bool = False) -> Tensor:
    """Barlow Twins loss: make the cross-correlation of two views the identity.

    Each dimension is standardised over the batch, C = (1/N) Z̄1ᵀZ̄2, L = Σ_j (1 − C_jj)² + λ Σ_{i≠j} C_ij².
    A dimension that is constant over the batch has no correlation: its C_jj is 0.

    Args:
        z1: Embeddings of the first view.
        z2: Embeddings of the second view.
        lambd: λ, the weight of the off-diagonal entries.
        unbiased: Divide by N − 1 in the standard deviation, as L-DAWA's code does; identical views then have
            C_jj = (N − 1)/N.

    Shape:
        z1, z2: (N, d), N >= 2. Output: scalar.

    Raises:
        ValueError: If the shapes differ or there are fewer than two rows.

    Reference:
        Zbontar et al., Barlow Twins: Self-Supervised Learning via Redundancy Reduction, 2021, Eq. 1 and 2.

    Example:
        >>> import torch
        >>> from atoll.functional import barlow_twins
        >>> z = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])  # views agree, and so do the two dimensions
        >>> round(barlow_twins(z, z).item(), 4)  # 2 · 0.0051
        0.0102
    """
    check_rows(least=2, z1=z1, z2=z2)
    c = standardise(z1, unbiased).T @ standardise(z2, unbiased) / len(z1)
    return (1.0 - c.diagonal()).square().sum() + lambd * off_diagonal_squares(c)


@full_precision
def decorrelation(h: Tensor) -> Tensor:
    """FedDecorr's loss: make the dimensions of a representation uncorrelated.

    With columns standardised by the unbiased variance (plus 1e-8) and M = X̄ᵀX̄,
    L = (1/N) · mean_{i≠j} M_ij². This is the scaling of the official code, about N times the paper's
    (1/d²)‖K‖_F²; the published coefficient of 0.1 refers to it. A single row or a single dimension gives 0.

    Args:
        h: Representations.

    Shape:
        h: (N, d). Output: scalar.

    Raises:
        ValueError: If `h` is not (N, d).

    Reference:
        Shi et al., Towards Understanding and Mitigating Dimensional Collapse in Heterogeneous Federated
        Learning, 2023 (released code).

    Example:
        >>> import torch
        >>> from atoll.functional import decorrelation
        >>> round(decorrelation(torch.tensor([[1.0, 1.0], [-1.0, -1.0]])).item(), 4)
        0.5
    """
    check_rows(h=h)
    n, d = h.shape
    if n == 1 or d == 1:
        return zero_loss(h)
    x = standardise(h, unbiased=True, eps=1e-8)
    return off_diagonal_squares(x.T @ x) / (d * (d - 1)) / n


@full_precision
def vicreg(
    z1: Tensor,
    z2: Tensor,
    invariance: float = 25.0,
    variance: float = 25.0,
    covariance: float = 1.0,
    official: bool = False,
) -> Tensor:
    """VICReg loss: views agree, each dimension varies, and different dimensions do not covary.

    L = λ s(Z, Z') + μ (v(Z) + v(Z')) + ν (c(Z) + c(Z')), with s = (1/N) Σ_i ‖z_i − z'_i‖²,
    v = (1/d) Σ_j max(0, 1 − sqrt(Var(z_j) + 1e-4)), c = (1/d) Σ_{i≠j} C_ij²; variances and the covariances C
    have N − 1.

    Args:
        z1: Embeddings Z of the first view.
        z2: Embeddings Z' of the second view.
        invariance: λ.
        variance: μ.
        covariance: ν.
        official: The released code's scaling: s is also divided by d, and v by 2.

    Shape:
        z1, z2: (N, d), N >= 2. Output: scalar.

    Raises:
        ValueError: If the shapes differ or there are fewer than two rows.

    Reference:
        Bardes et al., VICReg: Variance-Invariance-Covariance Regularization, 2022, Eqs. 1-6.

    Example:
        >>> import torch
        >>> from atoll.functional import vicreg
        >>> z = torch.tensor([[2.0, 2.0], [-2.0, -2.0]])  # views agree, dimensions vary, and covary: C_12 = 8
        >>> vicreg(z, z).item()  # 2 · (1/2) · (8² + 8²)
        128.0
    """
    check_rows(least=2, z1=z1, z2=z2)
    n, d = z1.shape
    agreement = (z1 - z2).square().sum() / n
    spread, overlap = zero_loss(z1), zero_loss(z1)
    for z in (z1, z2):
        centred = z - z.mean(dim=0)
        c = centred.T @ centred / (n - 1)
        spread = spread + (1 - (c.diagonal() + 1e-4).sqrt()).clamp_min(0).mean()
        overlap = overlap + off_diagonal_squares(c) / d
    if official:
        agreement, spread = agreement / d, spread / 2
    return invariance * agreement + variance * spread + covariance * overlap


class EncodingStatistics(NamedTuple):
    """Means over a batch, which determine the correlations between two views.

    The statistics of several batches together are the means of the batches' statistics, weighted by batch size.

    Attributes:
        mean1: Mean of each dimension of the first view.
        mean2: Mean of each dimension of the second view.
        square1: Mean square of each dimension of the first view.
        square2: Mean square of each dimension of the second view.
        product: Mean product of each dimension of the first view with each of the second.
    """

    mean1: Tensor
    mean2: Tensor
    square1: Tensor
    square2: Tensor
    product: Tensor


def encoding_statistics(z1: Tensor, z2: Tensor) -> EncodingStatistics:
    """Means, mean squares and mean products of two views' embeddings, in float64.

    Variances follow as ⟨f²⟩ − ⟨f⟩², a difference that float32 would round.

    Args:
        z1: Embeddings of the first view.
        z2: Embeddings of the second view.

    Shape:
        z1, z2: (N, d). Output: four (d,), and (d, d).

    Raises:
        ValueError: If the shapes differ.

    Reference:
        Vemulapalli et al., Federated Training of Dual Encoding Models on Small Non-IID Client Datasets, 2022.

    Example:
        >>> import torch
        >>> from atoll.functional import encoding_statistics
        >>> encoding_statistics(torch.tensor([[1.0], [3.0]]), torch.tensor([[2.0], [0.0]])).product.item()
        1.0
    """
    check_rows(z1=z1, z2=z2)
    f, g = z1.double(), z2.double()
    return EncodingStatistics(
        f.mean(dim=0), g.mean(dim=0), f.square().mean(dim=0), g.square().mean(dim=0), f.T @ g / len(f)
    )


def correlation_loss(statistics: EncodingStatistics, lambd: float = 0.0051) -> Tensor:
    """Barlow Twins' loss from encoding statistics instead of embeddings.

    C_ij = (⟨f_i g_j⟩ − ⟨f_i⟩⟨g_j⟩) / (σ(f_i) σ(g_j)), L = Σ_i (1 − C_ii)² + λ Σ_{i≠j} C_ij². A constant dimension
    has no correlation. For the statistics of one batch it equals `barlow_twins` of that batch.

    Args:
        statistics: Statistics of a batch, or of several clients' batches together.
        lambd: λ, the weight of the off-diagonal entries.

    Shape:
        Output: scalar, float32.

    Raises:
        ValueError: If the shapes do not match.

    Reference:
        Vemulapalli et al., Federated Training of Dual Encoding Models on Small Non-IID Client Datasets, 2022.

    Example:
        >>> import torch
        >>> from atoll.functional import encoding_statistics
        >>> from atoll.functional import correlation_loss
        >>> z = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])  # views agree, and so do the two dimensions
        >>> round(correlation_loss(encoding_statistics(z, z)).item(), 4)  # 2 · 0.0051
        0.0102
    """
    d = statistics.mean1.shape
    if len(d) != 1 or [tuple(each.shape) for each in statistics] != [d, d, d, d, d + d]:
        got = shapes(**statistics._asdict())
        raise ValueError(f"expected product (d, d), and means and mean squares (d,), got {got}")
    one = _inverse_deviation(statistics.mean1, statistics.square1)
    two = _inverse_deviation(statistics.mean2, statistics.square2)
    covariance = statistics.product - statistics.mean1[:, None] * statistics.mean2[None, :]
    c = one[:, None] * covariance * two[None, :]
    return ((1.0 - c.diagonal()).square().sum() + lambd * off_diagonal_squares(c)).float()


def _inverse_deviation(mean: Tensor, square: Tensor) -> Tensor:
    """1/σ of each dimension; 0, with gradient 0, of a dimension that is constant up to rounding."""
    variance = square - mean.square()
    constant = variance.detach() <= 64.0 * torch.finfo(mean.dtype).eps * square.detach()
    return torch.where(constant, 0.0, torch.where(constant, 1.0, variance).rsqrt())
