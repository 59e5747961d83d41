"""Random streams derived from what they are for, never from global state or order.

Two draws agree exactly when (seed, purpose, keys) agree, so a run gives the same numbers in one worker or
many, interrupted or not, in simulation or deployed (promise 1 of the design).
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch


def derive_seed(seed: int, purpose: str, *keys: int | str) -> int:
    """A 63-bit seed from a run's seed, a purpose such as ``"views"`` and keys such as (round, client).

    Example:
        >>> from atoll.core.rng import derive_seed
        >>> derive_seed(0, "views", 3, 7) == derive_seed(0, "views", 3, 7)
        True
        >>> derive_seed(0, "views", 3, 7) == derive_seed(0, "views", 3, 8)
        False
    """
    text = "/".join([str(seed), purpose, *map(str, keys)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def stream(seed: int, purpose: str, *keys: int | str) -> torch.Generator:
    """A CPU generator for this purpose. Draws are made on the CPU, so that a GPU run sees the same ones.

    PyTorch's CPU generator uses the seed's low 32 bits: enough that the few streams of one client's round differ,
    and that two alike somewhere in a long run mean nothing, but no secret.

    Example:
        >>> import torch
        >>> from atoll.core.rng import stream
        >>> once, again = (torch.rand(2, generator=stream(0, "views", 3)) for _ in range(2))
        >>> torch.equal(once, again)
        True
    """
    return torch.Generator().manual_seed(derive_seed(seed, purpose, *keys))


def numpy_stream(seed: int, purpose: str, *keys: int | str) -> np.random.Generator:
    """As `stream`, for NumPy: partitions and other index arithmetic."""
    return np.random.Generator(np.random.PCG64(derive_seed(seed, purpose, *keys)))
