"""Partitions that need no repeated draws: IID, β-skewness, shards of classes.

All functions take the indices of each class and return the sorted indices of each client. No index is assigned
twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


def split_evenly(indices: Indices, clients: int, rng: np.random.Generator) -> list[Indices]:
    """Split indices at random into parts whose sizes differ by at most one.

    Args:
        indices: The indices to split.
        clients: Number of clients.
        rng: Source of the random draws.

    Returns:
        The sorted indices of each client.
    """
    return [np.sort(part) for part in np.array_split(rng.permutation(indices), clients)]


def split_skewed(
    by_class: Sequence[Indices], clients: int, beta: float, rng: np.random.Generator
) -> list[Indices]:
    """Partition by β-skewness: ⌊(1 − β)N/K⌋ images per client class by class, ⌊βN/K⌋ from a uniform pool.

    Shares are exact fractions of β's decimal representation: in floating point, ⌊1000 · (1 − 0.9)⌋ would be 99. The
    skewed pool is rounded as a whole, because rounding each class down separately could leave too few images for
    the last client.

    Args:
        by_class: Indices of each class.
        clients: K, the number of clients.
        beta: β.
        rng: Source of the random draws.

    Returns:
        The sorted indices of each client.

    Reference:
        Wang et al., "Does Learning from Decentralized Non-IID Unlabeled Data Benefit from Self Supervision?",
        ICLR 2023.
    """
    shuffled = [rng.permutation(indices) for indices in by_class]
    sizes = np.array([len(indices) for indices in by_class])
    skew = 1 - Fraction(repr(float(beta)))
    N = int(sizes.sum())
    cuts = largest_remainder(sizes.astype(np.float64), int(N * skew))
    skewed = np.concatenate([indices[:cut] for indices, cut in zip(shuffled, cuts, strict=True)])
    uniform = rng.permutation(
        np.concatenate([indices[cut:] for indices, cut in zip(shuffled, cuts, strict=True)])
    )
    a, b = int(N * skew / clients), int(N * (1 - skew) / clients)
    return [
        np.sort(np.concatenate([skewed[k * a : (k + 1) * a], uniform[k * b : (k + 1) * b]]))
        for k in range(clients)
    ]


def split_shards(
    by_class: Sequence[Indices], clients: int, classes_per_client: int, rng: np.random.Generator
) -> list[Indices]:
    """Partition by shards: client k receives the S classes kS to kS + S − 1, modulo C.

    Each class is split evenly among its clients. S · K = C is FedCA's disjoint partition; S · K > C is EasyFL's,
    except that EasyFL leaves some images unused if S · K is not a multiple of C. The function requires
    S ≤ C ≤ S · K.

    Args:
        by_class: Indices of each of the C classes.
        clients: K, the number of clients.
        classes_per_client: S, the number of classes of each client.
        rng: Source of the random draws.

    Returns:
        The sorted indices of each client.
    """
    holders: list[list[int]] = [[] for _ in by_class]
    for turn in range(classes_per_client * clients):
        holders[turn % len(by_class)].append(turn // classes_per_client)
    shares: list[list[Indices]] = [[] for _ in range(clients)]
    for indices, owners in zip(by_class, holders, strict=True):
        for k, part in zip(owners, np.array_split(rng.permutation(indices), len(owners)), strict=True):
            shares[k].append(part)
    return [np.sort(np.concatenate(parts)) for parts in shares]


def largest_remainder(weights: NDArray[np.float64], total: int) -> Indices:
    """Round proportional shares to whole numbers that sum to `total`; each share is exact up to one unit.

    Args:
        weights: Weights of the shares.
        total: Sum of the result.

    Shape:
        - weights: (K,), non-negative, not all zero; output: (K,) int64

    Example:
        >>> import numpy as np
        >>> from atoll.data.partition.iid_skew_shards import largest_remainder
        >>> largest_remainder(np.array([1.0, 1.0, 1.0]), total=10).tolist()
        [4, 3, 3]
    """
    quotas = weights / weights.sum() * total
    # The tolerance restores whole numbers after rounding errors, such as 2.9999999999999996.
    counts: Indices = np.floor(quotas + 1e-9).astype(np.int64)
    short = int(total - counts.sum())
    counts[np.argsort(counts - quotas, kind="stable")[:short]] += 1
    return counts
