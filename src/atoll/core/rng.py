"""Named random streams, derived from their purpose and independent of global state and of the order of draws.

Two streams are equal exactly if (seed, purpose, keys) are equal. A run therefore gives the same numbers with one
worker or many, interrupted or not, in simulation or deployed (promise 1 in docs/promises.md).
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch


def derive_seed(seed: int, purpose: str, *keys: int | str) -> int:
    """Derive a 63-bit seed.

    Args:
        seed: The run's seed.
        purpose: Name of the stream, such as ``"views"``.
        *keys: Further keys, such as round and client.

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
    """CPU generator for a purpose. A run on a GPU also draws on the CPU, so it gets the same numbers.

    PyTorch's CPU generator uses only the low 32 bits of the seed. This is enough to keep the few streams of a
    client's round apart, and a collision somewhere in a long run is harmless. It is not enough for secrets.

    Args:
        seed: The run's seed.
        purpose: Name of the stream.
        *keys: Further keys, such as round and client.

    Example:
        >>> import torch
        >>> from atoll.core.rng import stream
        >>> once, again = (torch.rand(2, generator=stream(0, "views", 3)) for _ in range(2))
        >>> torch.equal(once, again)
        True
    """
    return torch.Generator().manual_seed(derive_seed(seed, purpose, *keys))


def numpy_stream(seed: int, purpose: str, *keys: int | str) -> np.random.Generator:
    """NumPy generator for a purpose, for partitions and other index arithmetic; see `stream`."""
    return np.random.Generator(np.random.PCG64(derive_seed(seed, purpose, *keys)))
