"""Distance of embeddings from an isotropic Gaussian, by their characteristic functions on random slices."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.functional._tensors import check_positive, check_rows, check_width, full_precision


@full_precision
def sigreg(z: Tensor, directions: Tensor, limit: float = 5.0, points: int = 9) -> Tensor:
    """SIGReg: the Epps-Pulley statistic of a batch against N(0, 1), averaged over slices.

    With φ̂_a(t) = (1/N) Σ_i exp(i t a·z_i), L = mean_a N ∫ |φ̂_a(t) − e^(−t²/2)|² e^(−t²/2) dt over [−limit, limit],
    by the trapezoid rule. The integrand is even in t, so only t ≥ 0 are evaluated. For N draws of N(0, I), L is
    1.059 on average, whatever N; for a collapsed batch, all zeros, it is 0.409 N. Embeddings are not normalised.

    Args:
        z: Embeddings.
        directions: Slices a, of length 1.
        limit: Largest t.
        points: Number of points in [0, limit]; 9 make 17 in [−limit, limit].

    Shape:
        z: (N, d). directions: (M, d). Output: scalar, >= 0.

    Raises:
        ValueError: If the shapes do not match, `limit` is not positive, or there are fewer than two points.

    Reference:
        Balestriero and LeCun, LeJEPA: Provable and Scalable Self-Supervised Learning Without the Heuristics, 2025.

    Example:
        >>> import torch
        >>> from atoll.functional import sigreg
        >>> round(sigreg(torch.zeros(2, 3), directions=torch.eye(3)).item(), 3)  # collapsed: 0.409 N
        0.818
    """
    check_rows(z=z)
    check_width(z, 1, directions=directions)
    check_positive(limit=limit)
    if points < 2:
        raise ValueError(f"points must be at least 2, got {points}")
    t = torch.linspace(0.0, limit, points, dtype=z.dtype, device=z.device)
    gauss = (-0.5 * t.square()).exp()
    weights = torch.full_like(t, 2.0 * limit / (points - 1))  # t and −t
    weights[-1] /= 2.0  # an end of the trapezoid rule; at t = 0 the integrand is 0
    angles = (z @ directions.T)[:, :, None] * t
    real, imaginary = angles.cos().mean(dim=0) - gauss, angles.sin().mean(dim=0)
    return len(z) * ((real.square() + imaginary.square()) @ (weights * gauss)).mean()
