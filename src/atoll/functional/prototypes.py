"""Prototypes: means of clusters of representations, and losses that draw samples to them."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.functional._tensors import (
    check_positive,
    check_rows,
    full_precision,
    shapes,
    squared_distances,
    unit,
)


@full_precision
@torch.no_grad()
def k_means(x: Tensor, draws: Tensor, iterations: int = 20) -> Tensor:
    """Clusters of rows, by Lloyd's algorithm from k-means++ seeds.

    A cluster that loses all rows keeps its centroid. On a GPU nothing is read back.

    Args:
        x: Rows to cluster.
        draws: Uniform random numbers from 0 to 1, one for each cluster; they choose the seeds.
        iterations: Number of updates of the centroids.

    Shape:
        x: (N, d). draws: (K,). Output: (N,), int64, from 0 to K − 1; a cluster may be empty.

    Raises:
        ValueError: If `x` is not (N, d), or `draws` is not (K,) with K >= 1.

    Reference:
        Arthur and Vassilvitskii, k-means++: The Advantages of Careful Seeding, 2007.

    Example:
        >>> import torch
        >>> from atoll.functional import k_means
        >>> k_means(torch.tensor([[0.0], [0.1], [9.0]]), draws=torch.tensor([0.0, 0.5])).tolist()
        [0, 0, 1]
    """
    check_rows(x=x)
    if draws.ndim != 1 or not len(draws):
        raise ValueError(f"expected one draw for each cluster, shape (K,), got {shapes(draws=draws)}")
    x = x - x.mean(dim=0)  # for `squared_distances`
    nearest = x.new_full((len(x),), 1.0)  # squared distances to the nearest seed; all equal before the first
    seeds: list[Tensor] = []
    for draw in torch.split(draws, 1):
        mass = nearest.cumsum(dim=0)
        row = torch.searchsorted(mass, draw * mass[-1:], right=True).clamp_max(len(x) - 1)
        seeds.append(x.index_select(0, row))
        distances = (x - seeds[-1]).square().sum(dim=1)
        nearest = distances if len(seeds) == 1 else torch.minimum(nearest, distances)
    centroids = torch.cat(seeds)
    for _ in range(iterations):
        means, present = _means(x, _assign(x, centroids), len(draws))
        centroids = torch.where(present[:, None], means, centroids)
    return _assign(x, centroids)


@full_precision
def prototype_contrast(
    z1: Tensor, z2: Tensor, labels1: Tensor, labels2: Tensor, clusters: int, temperature: float = 0.5
) -> Tensor:
    """NT-Xent between the prototypes of two views: means of a cluster's embeddings in each view.

    Only clusters with rows in both views count.

    Args:
        z1: Embeddings of the first view.
        z2: Embeddings of the second view.
        labels1: Clusters of the first view's rows.
        labels2: Clusters of the second view's rows.
        clusters: K, the number of clusters.
        temperature: τ.

    Shape:
        z1, z2: (N, d). labels1, labels2: (N,), int64, below K. Output: scalar.

    Raises:
        ValueError: If the shapes differ, a number is not positive, or a label on the CPU is no cluster.

    Reference:
        Chen et al., Calibre: Towards Fair and Accurate Personalized Federated Learning, ICDCS 2024 (released code).

    Example:
        >>> import torch
        >>> from atoll.functional import prototype_contrast
        >>> z, labels = torch.eye(2), torch.tensor([0, 1])
        >>> round(prototype_contrast(z, z, labels, labels, clusters=2, temperature=1.0).item(), 4)  # log(1 + 2/e)
        0.5514
    """
    check_rows(z1=z1, z2=z2)
    check_positive(clusters=clusters, temperature=temperature)
    _check_labels(z1, clusters, labels1=labels1, labels2=labels2)
    (first, in1), (second, in2) = _means(z1, labels1, clusters), _means(z2, labels2, clusters)
    valid = (in1 & in2).repeat(2)
    u = unit(torch.cat([first, second]))
    different = ~torch.eye(2 * clusters, dtype=torch.bool, device=u.device)
    partner = torch.arange(2 * clusters, device=u.device).roll(clusters)
    return _cross_entropy(u @ u.T / temperature, partner, valid & different, valid)


@full_precision
def prototype_classification(
    h1: Tensor, h2: Tensor, labels1: Tensor, labels2: Tensor, clusters: int
) -> Tensor:
    """Classify the second view's rows by their distance to the first view's prototypes.

    CE(−‖ĥ2_i − ŝ_c‖²) with the cluster of row i as its class; s_c is the mean of the first view's rows of cluster
    c, and the hat is normalisation. Clusters without a row in the first view are no class; their rows do not count.

    Args:
        h1: Representations of the first view.
        h2: Representations of the second view.
        labels1: Clusters of the first view's rows.
        labels2: Clusters of the second view's rows.
        clusters: K, the number of clusters.

    Shape:
        h1, h2: (N, d). labels1, labels2: (N,), int64, below K. Output: scalar.

    Raises:
        ValueError: If the shapes differ, `clusters` is not positive, or a label on the CPU is no cluster.

    Reference:
        Snell et al., Prototypical Networks for Few-shot Learning, 2017; Chen et al., Calibre: Towards Fair and
        Accurate Personalized Federated Learning, ICDCS 2024 (released code).

    Example:
        >>> import torch
        >>> from atoll.functional import prototype_classification
        >>> h, labels = torch.eye(2), torch.tensor([0, 1])
        >>> round(prototype_classification(h, h, labels, labels, clusters=2).item(), 4)  # log(1 + exp(−2))
        0.1269
    """
    check_rows(h1=h1, h2=h2)
    check_positive(clusters=clusters)
    _check_labels(h1, clusters, labels1=labels1, labels2=labels2)
    prototypes, present = _means(h1, labels1, clusters)
    scores = -squared_distances(unit(h2), unit(prototypes))
    return _cross_entropy(scores, labels2, present.expand_as(scores), present[labels2])


@full_precision
def prototype_divergence(h: Tensor, labels: Tensor, clusters: int, normalise: bool = True) -> Tensor:
    """Mean distance of rows to their normalised prototype, averaged over clusters.

    Args:
        h: Representations.
        labels: Clusters of the rows.
        clusters: K, the number of clusters; empty ones do not count.
        normalise: Normalise the rows too; then the result is at most 2. Calibre's released code does not.

    Shape:
        h: (N, d). labels: (N,), int64, below K. Output: scalar, >= 0.

    Raises:
        ValueError: If `h` is not (N, d), `clusters` is not positive, or a label on the CPU is no cluster.

    Reference:
        Chen et al., Calibre: Towards Fair and Accurate Personalized Federated Learning, ICDCS 2024 (released code).

    Example:
        >>> import torch
        >>> from atoll.functional import prototype_divergence
        >>> h = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 3.0]])
        >>> prototype_divergence(h, torch.tensor([0, 1, 1]), clusters=3).item()  # rows of one direction
        0.0
    """
    check_rows(h=h)
    check_positive(clusters=clusters)
    _check_labels(h, clusters, labels=labels)
    prototypes, _ = _means(h, labels, clusters)
    offsets = (unit(h) if normalise else h) - unit(prototypes)[labels]
    means, present = _means(torch.linalg.vector_norm(offsets, dim=1, keepdim=True), labels, clusters)
    return means.sum() / present.sum()


def _check_labels(rows: Tensor, clusters: int, **labels: Tensor) -> None:
    if any(one.shape != rows.shape[:1] or one.is_floating_point() for one in labels.values()):
        raise ValueError(f"expected a cluster for each row, got {shapes(rows=rows, **labels)}")
    for name, one in labels.items():
        if one.is_cpu and not 0 <= one.min() <= one.max() < clusters:  # reading a GPU's would halt the step
            least, most = one.min().item(), one.max().item()
            raise ValueError(f"{name} must be clusters from 0 to {clusters - 1}, got {least} to {most}")


def _means(x: Tensor, labels: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
    """Means of each cluster's rows (K, d), zero for an empty one, and which clusters have rows (K,)."""
    members = labels[:, None] == torch.arange(clusters, device=x.device)
    counts = members.sum(dim=0)
    return members.to(x.dtype).T @ x / counts.clamp_min(1)[:, None], counts > 0


def _assign(x: Tensor, centroids: Tensor) -> Tensor:
    return squared_distances(x, centroids).argmin(dim=1)


def _cross_entropy(scores: Tensor, target: Tensor, allowed: Tensor, valid: Tensor) -> Tensor:
    """Mean cross-entropy of the valid rows over their allowed entries; 0 without a valid row.

    Rows that do not count keep all entries, so that their loss and its gradient are finite.
    """
    scores = scores.masked_fill(~allowed & valid[:, None], -torch.inf)
    losses = scores.logsumexp(dim=1) - scores.gather(1, target[:, None])[:, 0]
    return (losses * valid).sum() / valid.sum().clamp_min(1)
