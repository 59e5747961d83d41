"""The spectral contrastive loss, alone and with other clients' correlation matrix as negatives."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from atoll.functional._tensors import check_positive, check_rows, full_precision, shapes


@full_precision
def clipped_correlation(z: Tensor, mu: float = 4.0) -> Tensor:
    """Correlation matrix R = (1/N) Σ_i z_i z_iᵀ of embeddings whose norms are clipped to √μ.

    The mean is not subtracted. Replacing one row changes R by at most 2μ/N in the Frobenius norm.

    Args:
        z: Embeddings.
        mu: μ, the largest squared norm of a row.

    Shape:
        z: (N, d). Output: (d, d).

    Raises:
        ValueError: If `z` is not (N, d), or μ is not positive.

    Reference:
        Jing et al., FedSC: Provable Federated Self-supervised Learning with Spectral Contrastive Objective over
        Non-i.i.d. Data, 2024.

    Example:
        >>> import torch
        >>> from atoll.functional import clipped_correlation
        >>> clipped_correlation(torch.tensor([[6.0, 0.0], [0.0, 1.0]]), mu=4.0)
        tensor([[2.0000, 0.0000],
                [0.0000, 0.5000]])
    """
    check_rows(z=z)
    z = _clip(z, mu)
    return z.T @ z / len(z)


@full_precision
def spectral_contrast(
    z1: Tensor, z2: Tensor, mu: float = 4.0, others: Tensor | None = None, share: float = 1.0
) -> Tensor:
    """Spectral contrastive loss of a client, with other clients' embeddings as negatives through their matrix.

    L = −(2/N) Σ_i z_i·z_i⁺ + a tr(R²) + 2(1 − a) tr(R C̄), where rows are clipped to norm √μ, R is the correlation
    matrix of both views, and C̄ that of the others. With a = 1, or without C̄, it is the spectral contrastive loss.

    Args:
        z1: Embeddings of the first view.
        z2: Embeddings of the second view.
        mu: μ, the largest squared norm of a row.
        others: C̄; None if there is none.
        share: a, the weight of the client's own negatives.

    Shape:
        z1, z2: (N, d). others: (d, d). Output: scalar.

    Raises:
        ValueError: If the shapes do not match, or μ is not positive.

    Reference:
        Jing et al., FedSC: Provable Federated Self-supervised Learning with Spectral Contrastive Objective over
        Non-i.i.d. Data, 2024.

    Example:
        >>> import torch
        >>> from atoll.functional import spectral_contrast
        >>> z = torch.eye(2)
        >>> spectral_contrast(z, z).item()
        -1.5
        >>> round(spectral_contrast(z, z, others=0.5 * z, share=0.2).item(), 4)
        -1.1
    """
    check_rows(z1=z1, z2=z2)
    z1, z2 = _clip(z1, mu), _clip(z2, mu)
    agreement = (z1 * z2).sum() / len(z1)
    both = torch.cat([z1, z2])
    own = both.T @ both / len(both)
    if others is None:
        return own.square().sum() - 2.0 * agreement
    if others.shape != own.shape:
        raise ValueError(f"expected shape {tuple(own.shape)}, got {shapes(others=others)}")
    return share * own.square().sum() + 2.0 * (1.0 - share) * (own * others.T).sum() - 2.0 * agreement


def _clip(z: Tensor, mu: float) -> Tensor:
    """Scale rows that are longer than √μ to that length."""
    check_positive(mu=mu)
    radius = math.sqrt(mu)
    norm = torch.linalg.vector_norm(z, dim=1, keepdim=True)
    return torch.where(norm > radius, z * (radius / norm.clamp_min(radius)), z)
