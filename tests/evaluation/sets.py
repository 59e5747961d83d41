"""Features that are easy to reason about."""

import torch
from torch import Tensor

Labelled = tuple[Tensor, Tensor, Tensor, Tensor]


def blobs(n: int, d: int, classes: int, spread: float, seed: int = 0) -> Labelled:
    """Training and test features around class centres."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, d, generator=generator)
    y = torch.randint(classes, (n + n // 2,), generator=generator)
    h = centres[y] + spread * torch.randn(len(y), d, generator=generator)
    return h[:n], y[:n], h[n:], y[n:]
