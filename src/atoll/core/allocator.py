"""Settings of the C library's allocator for training: memory that a step frees is kept for the next step."""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache

# Names and values of glibc's <malloc.h>; 32 MiB is the largest threshold that every version takes.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
KEPT_FREE, MAPPED_ALONE = 256 << 20, 32 << 20
OWN_CHOICE = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")


@cache
def keep_freed_memory() -> bool:
    """Let this process keep up to 256 MiB of freed memory, once.

    By default, glibc returns freed memory of more than 64 MiB to the kernel. A training step frees its activations
    at its end, and the next step requests the same memory again; the kernel then has to provide and clear its
    pages. The peak memory does not increase.

    Returns:
        Whether this was set. It is not with another C library or allocator, or if the user's environment sets the
        allocator.
    """
    if platform.libc_ver()[0] != "glibc" or any(name.startswith(OWN_CHOICE) for name in os.environ):
        return False
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return False
    return bool(set_option(MMAP_THRESHOLD, MAPPED_ALONE) and set_option(TRIM_THRESHOLD, KEPT_FREE))
