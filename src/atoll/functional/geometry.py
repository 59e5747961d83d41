"""Metrics of representations, models and partitions: rank, angles, distances."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from atoll.functional._tensors import check_finite, check_rows, full_precision, shapes, unit, zero_loss


@full_precision
def effective_rank(h: Tensor) -> Tensor:
    """Effective rank: exponential of the entropy of the normalised singular values, without centring.

    p_i = σ_i / Σσ, erank = exp(−Σ p_i log p_i), in [1, min(N, d)]. Singular values at rounding level count as
    zero, and a matrix of zeros has effective rank 0.

    Args:
        h: Representations.

    Shape:
        h: (N, d). Output: scalar.

    Raises:
        ValueError: If `h` is not (N, d), or not finite.

    Reference:
        Roy and Vetterli, The Effective Rank, 2007; Fang et al., Soft Separation and Distillation, 2025, Eq.
        11.

    Example:
        >>> import torch
        >>> from atoll.functional import effective_rank
        >>> round(effective_rank(torch.eye(3)).item(), 4)
        3.0
        >>> round(effective_rank(torch.ones(5, 3)).item(), 4)  # collapsed onto one direction
        1.0
    """
    check_rows(h=h)
    check_finite(h=h)
    sigma = torch.linalg.svdvals(h)
    sigma = sigma[sigma > sigma.max() * max(h.shape) * torch.finfo(h.dtype).eps]
    if sigma.numel() == 0:
        return zero_loss(h)
    p = sigma / sigma.sum()
    return torch.exp(-(p * p.log()).sum())


@full_precision
def representation_angle(h1: Tensor, h2: Tensor) -> Tensor:
    """Angle in degrees between two models' representations of each image: arccos(ĥ1·ĥ2).

    The formula used is 2·atan2(‖ĥ1 − ĥ2‖, ‖ĥ1 + ĥ2‖), which preserves small angles that an arccos would round to
    zero, and has a gradient everywhere. A row of zeros has an angle of 90° to every row.

    Args:
        h1: Representations of the first model.
        h2: Representations of the second model, for the same images in the same order.

    Shape:
        h1, h2: (N, d). Output: (N,).

    Raises:
        ValueError: If the shapes differ.

    Reference:
        Zhang et al., Federated Unsupervised Representation Learning, 2023, Figure 4; Kahan, How Futile are
        Mindless Assessments of Roundoff, 2006, Section 12.

    Example:
        >>> import torch
        >>> from atoll.functional import representation_angle
        >>> h1, h2 = torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.tensor([[0.0, 2.0], [1.0, 0.0]])
        >>> representation_angle(h1, h2).round(decimals=3)
        tensor([90., 45.])
    """
    check_rows(h1=h1, h2=h2)
    u1, u2 = unit(h1), unit(h2)
    difference, total = (u1 - u2).square().sum(dim=1), (u1 + u2).square().sum(dim=1)
    both_zero = difference + total == 0
    difference, total = torch.where(both_zero, 1.0, difference), torch.where(both_zero, 1.0, total)
    return torch.rad2deg(2.0 * torch.atan2(_root(difference), _root(total)))


def _root(square: Tensor) -> Tensor:
    """Square root whose gradient at zero is zero instead of infinity."""
    zero = square == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, square).sqrt())


def weight_distance(w1: Mapping[str, Tensor], w2: Mapping[str, Tensor]) -> Tensor:
    """Distance between two models: Σ_l ‖w1^(l) − w2^(l)‖₂ over their tensors.

    Integer tensors are counters, not weights, and are left out.

    Args:
        w1: The first model's tensors by name.
        w2: The second model's tensors, with the same names and shapes.

    Shape:
        Output: scalar.

    Raises:
        ValueError: If names or shapes differ, or no tensor is floating.

    Reference:
        Wang et al., Does Learning from Decentralized Non-IID Unlabeled Data Benefit from Self Supervision?,
        2023.

    Example:
        >>> import torch
        >>> from atoll.functional import weight_distance
        >>> w1 = {"weight": torch.tensor([3.0, 0.0]), "bias": torch.tensor([1.0])}
        >>> w2 = {"weight": torch.tensor([0.0, 4.0]), "bias": torch.tensor([0.0])}
        >>> round(weight_distance(w1, w2).item(), 4)  # 5 + 1
        6.0
    """
    if w1.keys() != w2.keys():
        raise ValueError(f"the models differ in these tensors: {sorted(w1.keys() ^ w2.keys())}")
    distances = []
    for name, a in w1.items():
        if a.shape != w2[name].shape:
            raise ValueError(f"the shapes of {name!r} differ: {shapes(w1=a, w2=w2[name])}")
        if a.is_floating_point():
            dtype = torch.promote_types(a.dtype, torch.float32)
            distances.append(torch.linalg.vector_norm(a.to(dtype) - w2[name].to(dtype)))
    if not distances:
        raise ValueError(f"expected models with floating tensors, got {shapes(**w1) or 'no tensor'}")
    return torch.stack(distances).sum()


@full_precision
@torch.no_grad()
def representability(w: Tensor) -> Tensor:
    """Share of each input axis that a linear map preserves: r_i = ‖Π_S e_i‖², S the row space of w.

    r = diag(VVᵀ) for an orthonormal basis V of the row space, each r_i in [0, 1], Σ r_i = rank(w). This is a
    metric: no gradient flows.

    Args:
        w: The matrix of the linear map.

    Shape:
        w: (m, d). Output: (d,).

    Raises:
        ValueError: If `w` is not (m, d), or not finite.

    Reference:
        Wang et al., Does Learning from Decentralized Non-IID Unlabeled Data Benefit from Self Supervision?,
        2023, Definition 3.1.

    Example:
        >>> import torch
        >>> from atoll.functional import representability
        >>> representability(torch.tensor([[1.0, 1.0, 0.0]])).round(decimals=3)
        tensor([0.5000, 0.5000, 0.0000])
    """
    check_rows(w=w)
    check_finite(w=w)
    _, sigma, vh = torch.linalg.svd(w, full_matrices=False)
    spanning: Tensor = vh[sigma > sigma.max() * max(w.shape) * torch.finfo(w.dtype).eps]
    return spanning.square().sum(dim=0)


@full_precision
@torch.no_grad()
def label_distance(counts: Tensor) -> Tensor:
    """Mean L1 distance between the clients' label distributions and the overall one.

    (1/K) Σ_k Σ_c |p_k(c) − p(c)|, in [0, 2], where p is the distribution of all samples together. The papers
    call it EMD, but it is an L1 distance. A client without samples has no label distribution and is left out
    of the mean.

    Args:
        counts: Number of samples of each class at each client.

    Shape:
        counts: (K, C), of any real dtype. Output: scalar.

    Raises:
        ValueError: If `counts` is not (K, C), has a negative entry, or is all zero.

    Reference:
        Wang et al., Does Learning from Decentralized Non-IID Unlabeled Data Benefit from Self Supervision?,
        2023, Figure 17.

    Example:
        >>> import torch
        >>> from atoll.functional import label_distance
        >>> label_distance(torch.tensor([[10, 0], [0, 10]])).item()  # one class a client
        1.0
        >>> label_distance(torch.tensor([[5, 5], [5, 5]])).item()
        0.0
    """
    if counts.ndim != 2 or 0 in counts.shape or bool((counts < 0).any()) or not bool((counts > 0).any()):
        raise ValueError(f"expected counts (K, C), none negative and not all 0, got {shapes(counts=counts)}")
    dtype = counts.dtype if counts.is_floating_point() else torch.get_default_dtype()
    n = counts.double()
    held = n[n.sum(dim=1) > 0]
    local = held / held.sum(dim=1, keepdim=True)
    overall = n.sum(dim=0) / n.sum()
    return (local - overall).abs().sum(dim=1).mean().to(dtype)
