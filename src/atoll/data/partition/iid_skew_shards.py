"""Ways to split indices among clients that always succeed: even parts, β-skewness, shards of classes.

All take the indices of each class and give each client's indices, sorted. No index is given out twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


def split_evenly(indices: Indices, clients: int, rng: np.random.Generator) -> list[Indices]:
    """Random parts whose sizes differ by one at most."""
    return [np.sort(part) for part in np.array_split(rng.permutation(indices), clients)]


def split_skewed(
    by_class: Sequence[Indices], clients: int, beta: float, rng: np.random.Generator
) -> list[Indices]:
    """β-skewness: ⌊(1 − β)N/K⌋ of a client come class by class, ⌊βN/K⌋ from a pool uniform over the classes.

    Shares are exact fractions of β as it is written: in floating point ⌊1000 · (1 − 0.9)⌋ would be 99. The
    skewed pool is rounded as a whole, because flooring each class on its own could leave the last client
    short.

    Reference:
        Wang et al., "Does Decentralized Learning with Non-IID Unlabeled Data Benefit from Self Supervision?",
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
    """S classes at each client, in turn: client k gets classes kS to kS + S − 1, modulo C.

    A class is split evenly among the clients that got it. S · K = C is FedCA's disjoint split; S · K > C is
    EasyFL's, without the parts that EasyFL leaves unused where S · K is no multiple of C. Needs S ≤ C ≤ S ·
    K.
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
    """Whole numbers that sum to `total`, in proportion to `weights` up to one unit each.

    Shape:
        - weights: (K,), non-negative, not all zero; output: (K,) int64

    Example:
        >>> import numpy as np
        >>> from atoll.data.partition.iid_skew_shards import largest_remainder
        >>> largest_remainder(np.array([1.0, 1.0, 1.0]), total=10).tolist()
        [4, 3, 3]
    """
    quotas = weights / weights.sum() * total
    # 2.9999999999999996 is a 3 that rounding spoiled.
    counts: Indices = np.floor(quotas + 1e-9).astype(np.int64)
    short = int(total - counts.sum())
    counts[np.argsort(counts - quotas, kind="stable")[:short]] += 1
    return counts
