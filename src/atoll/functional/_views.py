"""Cross-entropies between the views of the same images."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.functional._tensors import shapes


def check_views(what: str, **tensors: Tensor) -> None:
    """Check that the first tensor is (V, N, K) with V ≥ 2, and the second (G, N, K) with 1 ≤ G ≤ V.

    Raises:
        ValueError: If they are not; the message begins with the expected shapes, ``what``.
    """
    seen, given = tensors.values()
    fits = seen.ndim == given.ndim == 3 and seen.shape[1:] == given.shape[1:]
    if not fits or len(seen) < 2 or not 1 <= len(given) <= len(seen):
        raise ValueError(f"expected {what} with V >= 2 and 1 <= G <= V, got {shapes(**tensors)}")


def entropy_between_views(targets: Tensor, logits: Tensor) -> Tensor:
    """Mean over the pairs (u, v), u ≠ v, of −(1/N) Σ_i ⟨p_ui, log softmax(s_vi)⟩.

    Args:
        targets: p, distributions of the first G views.
        logits: s, of all views.

    Shape:
        targets: (G, N, K). logits: (V, N, K). Output: scalar.
    """
    given, seen = len(targets), len(logits)
    entropies = -torch.einsum("unk,vnk->uv", targets, logits.log_softmax(dim=2)) / logits.shape[1]
    same = torch.eye(given, seen, dtype=torch.bool, device=logits.device)
    return entropies.masked_fill(same, 0.0).sum() / (given * seen - given)
