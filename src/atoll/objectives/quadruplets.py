"""FedQuad's stochastic quadruplets: a positive and two negatives for each sample of a client."""

from __future__ import annotations

import torch
from torch import Tensor


def draw_quadruplets(labels: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a positive and two negatives of two different other classes for each sample as the anchor.

    A positive is uniform over the other samples of the anchor's class; a negative is uniform over the samples of a
    class that is itself uniform over the remaining classes. The paper does not define the cases without enough
    samples or classes. This implementation handles them as follows:

    - a class with one sample: the anchor is also the positive;
    - two classes: both negatives come from the other class (the same sample twice, if it has only one);
    - one class: there are no negatives, and the result has two rows.

    Args:
        labels: Labels of a client's samples.
        generator: Source of the random draws, on the CPU.

    Shape:
        labels: (N,) of integers. Output: (4, N) positions of anchors, positives, first and second negatives;
        (2, N) if there is one class.

    Reference:
        Göksu and Pugeault, FedQuad, 2025, Section III-A.
    """
    classes, codes = torch.unique(labels, return_inverse=True)
    counts = torch.bincount(codes, minlength=len(classes))
    order = torch.argsort(codes, stable=True)  # samples class by class
    first = counts.cumsum(0) - counts
    n, c = len(labels), len(classes)
    anchors = torch.arange(n)
    rank = torch.empty_like(order)
    rank[order] = anchors - first[codes[order]]  # position of each sample within its class

    def below(limit: Tensor) -> Tensor:
        return (torch.rand(n, generator=generator, dtype=torch.float64) * limit).long()

    def other(kind: Tensor, than: Tensor) -> Tensor:
        """Draw a sample of each class that is not at the given position; the only sample if there is one."""
        drawn = below(counts[kind] - 1)
        return order[first[kind] + torch.where(counts[kind] > 1, drawn + (drawn >= than).long(), than)]

    positives = other(codes, rank)
    if c == 1:
        return torch.stack([anchors, positives])
    kind1 = below(torch.full((n,), c - 1))
    kind1 += kind1 >= codes
    negatives1 = order[first[kind1] + below(counts[kind1])]
    if c == 2:
        return torch.stack([anchors, positives, negatives1, other(kind1, rank[negatives1])])
    kind2 = below(torch.full((n,), c - 2))
    kind2 += kind2 >= torch.minimum(codes, kind1)
    kind2 += kind2 >= torch.maximum(codes, kind1)
    negatives2 = order[first[kind2] + below(counts[kind2])]
    return torch.stack([anchors, positives, negatives1, negatives2])
