"""Uniformity of embeddings on the sphere: the loss, its decomposition by client, FedU²'s sliced transport."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from atoll.core.devices import upload
from atoll.functional._tensors import check_positive, check_rows, full_precision, shapes, unit

# Number of entries of the largest block of pairwise distances in memory: 16 MiB in float32. A training batch of
# up to 2,048 rows is one block; 10,000 test features need a few dozen.
BLOCK = 2**22


def _pair_blocks(u: Tensor, t: float) -> Iterator[tuple[slice, slice, Tensor]]:
    """Blocks of −t‖u_i − u_j‖² that together contain each pair i < j once, and −∞ elsewhere.

    The last row is the first member of no pair and starts no block, so every block contains at least one pair and
    its logsumexp has a gradient. The squared distance comes from a Gram matrix without a square root, so identical
    rows have a gradient (zero) too.
    """
    n = len(u)
    square = u.square().sum(dim=1)
    step = max(1, BLOCK // n)
    for start in range(0, n - 1, step):
        rows, columns = slice(start, min(start + step, n - 1)), slice(start, n)
        exponent = (u[rows] @ u[columns].T) * (2.0 * t) - t * (square[rows, None] + square[None, columns])
        above = torch.ones_like(exponent, dtype=torch.bool).triu_(1)
        yield rows, columns, exponent.masked_fill(~above, -torch.inf)


@full_precision
def uniformity(z: Tensor, t: float = 2.0) -> Tensor:
    """Logarithm of the mean Gaussian potential over pairs; lower is more uniform.

    L = log[2/(N(N−1)) Σ_{i<j} exp(−t‖ẑ_i − ẑ_j‖²)], at most 0, the value of a collapsed representation. SSD's Eq. 4
    prints −log, and tables report −L; the quantity that is minimised is L.

    Args:
        z: Embeddings of one view.
        t: The inverse width of the kernel.

    Shape:
        z: (N, d), N >= 2. Output: scalar.

    Raises:
        ValueError: If there are fewer than two rows (and therefore no pair), or t is not positive.

    Reference:
        Wang and Isola, Understanding Contrastive Representation Learning through Alignment and Uniformity on
        the Hypersphere, 2020.

    Example:
        >>> import torch
        >>> from atoll.functional import uniformity
        >>> round(uniformity(torch.eye(3)).item(), 4)  # every squared distance is 2
        -4.0
    """
    check_rows(least=2, z=z)
    check_positive(t=t)
    sums = torch.stack([block.flatten().logsumexp(dim=0) for _, _, block in _pair_blocks(unit(z), t)])
    return sums.logsumexp(dim=0) - math.log(len(z) * (len(z) - 1) / 2)


class UniformityDecomposition(NamedTuple):
    """Uniformity over all pairs, and its parts within a client and between clients.

    Attributes:
        total: Logarithm of the mean potential over all pairs.
        intra: Logarithm of the mean potential over pairs within a client.
        inter: Logarithm of the mean potential over pairs of two clients.
    """

    total: Tensor
    intra: Tensor
    inter: Tensor


@full_precision
@torch.no_grad()
def uniformity_decomposition(h: Tensor, client_ids: Tensor, t: float = 2.0) -> UniformityDecomposition:
    """Decompose uniformity exactly into its parts within clients and between clients.

    With G the potential of `uniformity`, intra = log mean G over the pairs i < j of one client, and inter = log
    mean G over the pairs of two clients. With the numbers n_intra and n_inter of such pairs,
    (n_intra·e^intra + n_inter·e^inter) / (n_intra + n_inter) = e^total, where total is `uniformity(h, t)`. SSD's
    Eq. 5 omits these mixture weights. This is a metric: no gradient flows. Computing in blocks bounds the memory.

    Args:
        h: Representations of all clients' samples.
        client_ids: The client that holds each row's sample.
        t: The inverse width of the kernel.

    Shape:
        h: (N, d), N >= 2. client_ids: (N,) of integers. Output: three scalars.

    Raises:
        ValueError: If the shapes do not match, t is not positive, or a part has no pairs (a single client, or
            one row per client).

    Reference:
        Fang et al., Soft Separation and Distillation, 2025, Eq. 5, with the mixture weights.

    Example:
        >>> import torch
        >>> from atoll.functional import uniformity_decomposition
        >>> h = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
        >>> split = uniformity_decomposition(h, client_ids=torch.tensor([0, 0, 1, 1]))
        >>> [round(part.item(), 4) for part in split]  # total, intra, inter
        [-1.0626, 0.0, -4.0]
    """
    check_rows(least=2, h=h)
    check_positive(t=t)
    if client_ids.shape != h.shape[:1] or client_ids.is_floating_point():
        raise ValueError(
            f"expected an integer client id for each row, got {shapes(h=h, client_ids=client_ids)}"
        )
    n = len(h)
    sizes = [int(size) for size in torch.unique(client_ids, return_counts=True)[1]]
    pairs = n * (n - 1) // 2
    pairs_intra = sum(size * (size - 1) // 2 for size in sizes)
    if not 0 < pairs_intra < pairs:
        got = shapes(h=h, client_ids=client_ids)
        raise ValueError(f"a split needs two clients, one of them with two rows: got sizes {sizes} in {got}")
    intra, inter = [], []
    for rows, columns, block in _pair_blocks(unit(h), t):
        same = client_ids[rows, None] == client_ids[None, columns]
        intra.append(block.masked_fill(~same, -torch.inf).flatten().logsumexp(dim=0))
        inter.append(block.masked_fill_(same, -torch.inf).flatten().logsumexp(dim=0))
    log_intra = torch.stack(intra).logsumexp(dim=0)
    log_inter = torch.stack(inter).logsumexp(dim=0)
    return UniformityDecomposition(
        torch.logaddexp(log_intra, log_inter) - math.log(pairs),
        log_intra - math.log(pairs_intra),
        log_inter - math.log(pairs - pairs_intra),
    )


def _tangent_coordinates(points: Tensor, tangents: Tensor, directions: Tensor) -> Tensor:
    """Coordinates ⟨p, Log_c(x)⟩ of the sphere's logarithm at each c, along each p.

    Log_c(x) = (θ/sin θ)(x − cos θ·c) with cos θ = ⟨c, x⟩, so its coordinates need only inner products, and tangent
    vectors are never materialised. Near x = ±c, where arccos has no derivative, cos θ is clamped and passes no
    gradient.

    Shape:
        points: (N, d). tangents: (M, d). directions: (M, P, d). Output: (M, P, N).
    """
    cos = (tangents @ points.T).clamp(-1.0 + 1e-6, 1.0 - 1e-6)
    stretch = cos.arccos() / (1.0 - cos.square()).sqrt()
    along = directions @ points.T
    radial = (directions * tangents[:, None, :]).sum(dim=2)
    return stretch[:, None, :] * (along - cos[:, None, :] * radial[:, :, None])


def _squared_wasserstein(a: Tensor, b: Tensor) -> Tensor:
    """W₂² of two sets of N points on a line: the mean squared difference of the sorted points.

    Shape:
        a, b: (…, N). Output: (…).
    """
    return (a.sort(dim=-1).values - b.sort(dim=-1).values).square().mean(dim=-1)


@full_precision
def sphere_sliced_uniformity(
    z: Tensor, generator: torch.Generator | None = None, projections: int = 6
) -> Tensor:
    """FedU²'s flexible uniform regulariser as released: sliced transport from a batch to the uniform sphere.

    The function draws N points y uniformly on the sphere, and N tangent points c. At each c, Log_c(ẑ) and Log_c(y)
    are projected onto Gaussian directions (not normalised) and compared by W₂². The result is the sum over tangent
    points of the mean over directions, divided by 6: the released code divides by that constant and loops over N
    points. The unbalanced transport of the paper is not available; its code does not use it.

    Args:
        z: Projector embeddings of one view.
        generator: Source of the random draws, a CPU generator for any device of `z`; the global one if None.
        projections: Number of directions at each tangent point.

    Shape:
        z: (N, d). Output: scalar, >= 0.

    Raises:
        ValueError: If `z` is not (N, d) or `projections` is not positive.

    Reference:
        Liao et al., Rethinking the Representation in Federated Unsupervised Learning with Non-IID Data, 2024
        (released code).

    Example:
        >>> import torch
        >>> from atoll.functional import sphere_sliced_uniformity
        >>> def loss(z):
        ...     return sphere_sliced_uniformity(z, torch.Generator().manual_seed(0), projections=100)
        >>> spread, collapsed = torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), torch.ones(2, 2)
        >>> bool(loss(spread) < loss(collapsed))
        True
    """

    def normal(*shape: int) -> Tensor:
        return upload(torch.randn(shape, generator=generator), z.device)

    return sliced_uniformity(z, normal, projections)


@full_precision
def sliced_uniformity(z: Tensor, normal: Callable[..., Tensor], projections: int) -> Tensor:
    """`sphere_sliced_uniformity` with draws from a function instead of a generator.

    Args:
        z: Projector embeddings of one view.
        normal: ``normal(*shape)`` draws normal numbers on the device of `z`.
        projections: Number of directions at each tangent point.

    Shape:
        z: (N, d). Output: scalar, >= 0.

    Raises:
        ValueError: If `z` is not (N, d) or `projections` is not positive.
    """
    check_rows(z=z)
    check_positive(projections=projections)
    n, d = z.shape
    tangents = unit(normal(n, d).to(z.dtype))
    samples = unit(normal(n, d).to(z.dtype))
    directions = normal(n, projections, d).to(z.dtype)
    return _sliced_distance(unit(z), samples, tangents, directions)


def _sliced_distance(u: Tensor, samples: Tensor, tangents: Tensor, directions: Tensor) -> Tensor:
    """`sphere_sliced_uniformity` for given random draws."""
    distance = _squared_wasserstein(
        _tangent_coordinates(u, tangents, directions), _tangent_coordinates(samples, tangents, directions)
    )
    return distance.mean(dim=1).sum() / 6.0
