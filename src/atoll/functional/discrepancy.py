"""Discrepancy of two samples: maximum mean discrepancy with a Gaussian kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.functional._tensors import (
    MIN_NORM,
    check_rows,
    check_width,
    full_precision,
    shapes,
    squared_distances,
)


@full_precision
def mean_distance(z: Tensor) -> Tensor:
    """Mean Euclidean distance between different rows.

    Args:
        z: Rows.

    Shape:
        z: (N, d), N >= 2. Output: scalar, >= 0.

    Raises:
        ValueError: If `z` is not (N, d) with N >= 2.

    Reference:
        Chen et al., Understanding the Robustness of Distributed Self-Supervised Learning Frameworks Against Non-IID
        Data, ICLR 2026, the bandwidth σ of Eq. 6.

    Example:
        >>> import torch
        >>> from atoll.functional import mean_distance
        >>> mean_distance(torch.tensor([[0.0], [3.0], [6.0]])).item()  # 3, 3 and 6
        4.0
    """
    check_rows(2, z=z)
    squares = _squares(z, z)
    positive = squares > 0  # equal rows have the gradient zero, where the square root has none
    return (torch.where(positive, squares, 1.0).sqrt() * positive).sum() / (len(z) * (len(z) - 1))


@full_precision
def mmd(x: Tensor, y: Tensor, bandwidth: Tensor | float) -> Tensor:
    """Squared maximum mean discrepancy of two samples, with the Gaussian kernel k(a, b) = exp(−‖a − b‖²/2σ²).

    MMD² = mean_{a≠b} k(x_a, x_b) + mean_{a≠b} k(y_a, y_b) − 2 mean_{a,b} k(x_a, y_b), which is an unbiased estimate
    and may be negative.

    Args:
        x: One sample.
        y: The other sample.
        bandwidth: σ; 0 counts as a very small number.

    Shape:
        x: (N, d), N >= 2. y: (M, d), M >= 2. bandwidth: scalar. Output: scalar, from −2 to 2.

    Raises:
        ValueError: If the shapes do not match, or there is more than one bandwidth.

    Reference:
        Gretton et al., A Kernel Two-Sample Test, JMLR 2012, Eq. 3.

    Example:
        >>> import torch
        >>> from atoll.functional import mmd
        >>> x = torch.tensor([[0.0], [2.0]])
        >>> round(mmd(x, x, bandwidth=2.0).item(), 4)  # exp(−1/2) − 1
        -0.3935
    """
    check_rows(2, x=x)
    check_width(x, 2, y=y)
    sigma = torch.as_tensor(bandwidth, dtype=x.dtype, device=x.device).clamp_min(MIN_NORM)
    if sigma.numel() != 1:
        raise ValueError(f"expected one bandwidth, got {shapes(bandwidth=sigma)}")

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return (-_squares(a, b) / (2.0 * sigma.square())).exp()

    def of_different_rows(a: Tensor) -> Tensor:
        off_diagonal = 1.0 - torch.eye(len(a), dtype=a.dtype, device=a.device)
        return (kernel(a, a) * off_diagonal).sum() / (len(a) * (len(a) - 1))

    return of_different_rows(x) + of_different_rows(y) - 2.0 * kernel(x, y).mean()


@full_precision
def adaptive_mmd(z: Tensor, reference: Tensor) -> Tensor:
    """A-MMD: maximum mean discrepancy whose bandwidth is the mean distance between the rows of ``z``.

    The bandwidth is a constant for the gradient, and so is the reference.

    Args:
        z: Embeddings of the batch.
        reference: Embeddings to align with.

    Shape:
        z: (N, d), N >= 2. reference: (M, d), M >= 2. Output: scalar.

    Raises:
        ValueError: If the shapes do not match.

    Reference:
        Chen et al., Understanding the Robustness of Distributed Self-Supervised Learning Frameworks Against Non-IID
        Data, ICLR 2026, Eq. 6.

    Example:
        >>> import torch
        >>> from atoll.functional import adaptive_mmd
        >>> z = torch.tensor([[0.0], [2.0]])
        >>> round(adaptive_mmd(z, z + 100.0).item(), 4)  # far apart: 2 exp(−1/2)
        1.2131
    """
    return mmd(z, reference.detach(), mean_distance(z.detach()))


def _squares(a: Tensor, b: Tensor) -> Tensor:
    """‖a_i − b_j‖², (N, M), none below zero; at zero the gradient is zero."""
    centre = b.detach().mean(dim=0)
    squares = squared_distances(a - centre, b - centre).clamp_min(0.0)
    return squares.fill_diagonal_(0.0) if a is b else squares
