"""Dirichlet partitions over labels, in the four variants that the literature calls "Dir(α)".

All variants draw, for every class c, proportions p_c ~ Dir(α 1_K) over the K clients. They differ in how they
convert proportions to counts and in the draws that they accept, so client sizes for the same α differ considerably.
A draw determines sizes only; indices are assigned once, after a draw is accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atoll.data.partition.iid_skew_shards import Indices, largest_remainder

Counts = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Variant:
    """One published method to convert proportions to clients.

    Attributes:
        counts: Function (proportions (C, K), class sizes (C,), rng) → images by client and class (K, C).
        min_size: Default minimum number of images of a client.
        window: Bounds of a client's size as multiples of N/K.
        shuffle_classes: Whether a class is shuffled before it is split (otherwise it is split in dataset order).
        shuffle_clients: Whether a client's indices are shuffled at the end (otherwise they are class by class).
    """

    counts: Callable[[Floats, Counts, np.random.Generator], Counts]
    min_size: int = 1
    window: tuple[float, float] = (0.0, np.inf)
    shuffle_classes: bool = True
    shuffle_clients: bool = False

    def bounds(self, num_samples: int, clients: int) -> tuple[float, float]:
        """Minimum and maximum size of a client in an accepted draw."""
        low, high = self.window
        return low * num_samples / clients, high * num_samples / clients


def _masked(proportions: Floats, class_sizes: Counts, rng: np.random.Generator) -> Counts:
    """Split classes at ⌊cumulative p · N_c⌋; clients that already have N/K images receive no more."""
    C, K = proportions.shape
    counts = np.zeros((K, C), dtype=np.int64)
    sizes = np.zeros(K, dtype=np.int64)
    full = class_sizes.sum() / K
    for c, (p, size) in enumerate(zip(proportions, class_sizes, strict=True)):
        open_clients = sizes < full
        p = p * open_clients
        if not p.any():
            # For small α, all mass can be on full clients because of underflow; the limit is one random open
            # client.
            p[rng.choice(np.flatnonzero(open_clients))] = 1.0
        cuts = np.floor(np.cumsum(p / p.sum())[:-1] * size).astype(np.int64)
        counts[:, c] = np.diff(cuts, prepend=0, append=size)
        sizes += counts[:, c]
    return counts


def _whole(proportions: Floats, class_sizes: Counts, rng: np.random.Generator) -> Counts:
    """Assign every image: counts by largest remainder, without balancing."""
    return np.stack([largest_remainder(p, n) for p, n in zip(proportions, class_sizes, strict=True)], axis=1)


def _floored(proportions: Floats, class_sizes: Counts, rng: np.random.Generator) -> Counts:
    """Assign ⌊p · N_c⌋ images; the few images that remain after rounding down are not assigned to any client."""
    # With the tolerance, a client with proportion 1 receives the whole class despite rounding.
    return np.floor(proportions * class_sizes[:, None] + 1e-9).astype(np.int64).T


VARIANTS: dict[str, Variant] = {
    # A: clients shuffled.
    "moon": Variant(_masked, min_size=10, shuffle_clients=True),
    # B: clients class by class.
    "fedu2": Variant(_whole),
    # C: clients class by class, sizes within [0.5, 1.5] · N/K.
    "dec-ssl": Variant(_masked, window=(0.5, 1.5)),
    # D: clients class by class, in dataset order within a class.
    "l-dawa": Variant(_floored, shuffle_classes=False),
}


def dirichlet_counts(
    variant: Variant,
    class_sizes: Counts,
    clients: int,
    alpha: float,
    balanced: bool,
    rng: np.random.Generator,
) -> Counts:
    """Draw the number of images by client and class once.

    Args:
        variant: The variant.
        class_sizes: Number of images of each class.
        clients: K, the number of clients.
        alpha: α.
        balanced: Whether to balance the clients' totals with `sinkhorn_balance`.
        rng: Source of the random draws.

    Shape:
        - class_sizes: (C,)
        - output: (K, C), column sums at most class_sizes
    """
    proportions = rng.dirichlet(np.full(clients, alpha), size=len(class_sizes))
    if balanced:
        proportions = sinkhorn_balance(proportions, class_sizes)
    return variant.counts(proportions, class_sizes, rng)


def sinkhorn_balance(proportions: Floats, class_sizes: Counts, steps: int = 100) -> Floats:
    """Scale clients to equal totals and classes to a total of 1, alternately (Orchestra).

    Classes are weighted by their size, which equals Orchestra's step if all classes have the same size. The last
    scaling is that of the classes, so no class is assigned more often than it has images.

    Args:
        proportions: Proportions of each class over the clients.
        class_sizes: Number of images of each class.
        steps: Number of alternate scalings.

    Shape:
        - proportions: (C, K); class_sizes: (C,); output: (C, K), rows sum to 1

    Reference:
        Lubana et al., "Orchestra: Unsupervised Federated Learning via Globally Consistent
        Clustering", ICML 2022.
    """
    mass = proportions * class_sizes[:, None]
    per_client = class_sizes.sum() / proportions.shape[1]
    # A client whose mass underflows stays empty, and the draw is then refused.
    tiny = np.finfo(np.float64).tiny
    for _ in range(steps):
        mass = mass / np.maximum(mass.sum(axis=0, keepdims=True), tiny) * per_client
        mass = mass / np.maximum(mass.sum(axis=1, keepdims=True), tiny) * class_sizes[:, None]
    return mass / class_sizes[:, None]


def split_dirichlet(
    variant: Variant, by_class: Sequence[Indices], counts: Counts, rng: np.random.Generator
) -> list[Indices]:
    """Split each class by its counts and concatenate the pieces of every client, in the variant's order.

    Args:
        variant: The variant.
        by_class: Indices of each class.
        counts: Number of images by client and class, (K, C).
        rng: Source of the random draws.

    Returns:
        The indices of each client.
    """
    orders = [rng.permutation(indices) if variant.shuffle_classes else indices for indices in by_class]
    taken = [order[:count] for order, count in zip(orders, counts.sum(axis=0), strict=True)]
    # Each image's client; a stable sort by client leaves a client's images class by class.
    owners = [np.repeat(np.arange(len(counts)), counts[:, c]) for c in range(len(by_class))]
    together = np.concatenate(taken)[np.argsort(np.concatenate(owners), kind="stable")]
    shares = np.split(together, np.cumsum(counts.sum(axis=1))[:-1])
    return [rng.permutation(share) for share in shares] if variant.shuffle_clients else shares
