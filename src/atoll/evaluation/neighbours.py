"""Nearest neighbours by cosine similarity, and measures from them that need no labels."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

SIMILARITIES_AT_ONCE = 2**24  # 64 MiB of float32


def nearest(bank: Tensor, queries: Tensor, k: int, own: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Find the k nearest features of each query by cosine similarity, exactly, in blocks of queries.

    Among equally near features, the first ones are returned, in their order.

    Args:
        bank: Features to search.
        queries: Features whose neighbours are wanted.
        k: Number of neighbours; all features if there are fewer.
        own: The row of the bank that is the query itself, which is left out; by default none is.

    Shape:
        - bank: (N, d); queries: (M, d); own: (M,) int
        - Output: indices (M, min(k, N)) int64, similarities (M, min(k, N)); with ``own``, N − 1 for N

    Raises:
        ValueError: The shapes do not match, a set is empty, or k is not positive.

    Example:
        >>> import torch
        >>> from atoll.evaluation import nearest
        >>> bank = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        >>> nearest(bank, torch.tensor([[2.0, 0.1]]), k=2)[0]
        tensor([[0, 2]])
    """
    _check(bank=bank, queries=queries)
    if own is not None and own.shape != queries.shape[:1]:
        raise ValueError(
            f"own must name a row for each of {len(queries)} queries, got shape {tuple(own.shape)}"
        )
    if k < 1:
        raise ValueError(f"k must be positive, got {k}")
    k = min(k, len(bank) - (own is not None))
    blocks = list(nearest_blocks(bank, queries, k, own))
    return torch.cat([indices for _, indices in blocks]), torch.cat([similar for similar, _ in blocks])


def nearest_blocks(
    bank: Tensor, queries: Tensor, k: int, own: Tensor | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield similarities and indices of the k nearest features, block by block of the queries."""
    columns = F.normalize(bank.float(), dim=1).T.contiguous()
    queries = F.normalize(queries.float(), dim=1)
    rows = max(1, SIMILARITIES_AT_ONCE // len(bank))
    for start in range(0, len(queries), rows):
        similarity = queries[start : start + rows] @ columns
        if own is not None:
            similarity.scatter_(1, own[start : start + rows, None].to(similarity.device), -torch.inf)
        yield _largest(similarity, k)


def _check(**features: Tensor) -> None:
    found = [tuple(each.shape) for each in features.values()]
    if any(len(shape) != 2 or 0 in shape or shape[1] != found[0][1] for shape in found):
        named = " and ".join(f"{name} {shape}" for name, shape in zip(features, found, strict=True))
        raise ValueError(f"features must be (N, d) and (M, d), none of them empty; got {named}")


def _largest(similarity: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest entries of each row (all, if there are fewer), in order; of equal ones, the first, in order."""
    values, indices = similarity.topk(min(k + 1, similarity.shape[1]), dim=1)
    if values.shape[1] > k:
        tied = (values[:, k - 1] == values[:, k]).nonzero().squeeze(1)
        indices[tied, :k] = _first_of_equal(similarity[tied], values[tied, :k], indices[tied, :k])
    indices = indices[:, :k].sort(dim=1).values
    values, order = similarity.gather(1, indices).sort(dim=1, descending=True, stable=True)
    return values, indices.gather(1, order)


def _first_of_equal(similarity: Tensor, values: Tensor, indices: Tensor) -> Tensor:
    """Replace the indices of the entries that equal the least of the largest ones by the first such entries."""
    (n, k), least = (similarity.shape[1], values.shape[1]), values[:, -1:]
    places = torch.arange(n, device=similarity.device).expand_as(similarity)
    first = places.where(similarity == least, n).topk(k, largest=False).values
    larger = values != least
    taken = torch.arange(k, device=similarity.device) - larger.sum(1, keepdim=True)
    return torch.where(larger, indices, first.gather(1, taken.clamp(min=0)))


def same_image_retrieval(view1: Tensor, view2: Tensor) -> float:
    """Share of images whose second view is nearest to their own first view, among all first views.

    Chance is 1/N. The measure needs no labels; it is low if augmentation changes a representation more than another
    image does.

    Args:
        view1: Features of one view of each image.
        view2: Features of another view of the same images, in the same order.

    Shape:
        - view1, view2: (N, d)

    Raises:
        ValueError: The shapes differ, or there are no images.
    """
    _check(view1=view1, view2=view2)
    if len(view1) != len(view2):
        raise ValueError(f"the views must be of the same images, got {len(view1)} and {len(view2)} rows")
    indices, _ = nearest(view1, view2, 1)
    return float((indices[:, 0].cpu() == torch.arange(len(view2))).double().mean())


def same_client_share(neighbours: Tensor, clients: Tensor, of_queries: Tensor) -> tuple[float, float]:
    """Share of the neighbours that the query's own client holds, and the share expected by chance.

    If the share is far above chance, the representation separates clients, by their classes or by other
    differences.

    Args:
        neighbours: Rows of the neighbours of each query.
        clients: The client of each row; −1 for none.
        of_queries: The row of each query; its client holds it, and it is not its own neighbour.

    Shape:
        - neighbours: (M, k); clients: (N,) int; of_queries: (M,) int
    """
    own = clients[of_queries]
    held = torch.stack([(clients == client).sum() - 1 for client in own]).double()
    share = (clients[neighbours] == own[:, None]).double().mean()
    return float(share), float((held / (len(clients) - 1)).mean())
