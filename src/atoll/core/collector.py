"""Python's cyclic garbage collector, which imports of PyTorch and Atoll keep busy without effect."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """Pause the collector: while modules are imported, and while a GPU records.

    Imports create about a million permanent objects; whenever their number has grown by a quarter, the collector
    would examine all of them again.

    Example:
        >>> import gc
        >>> from atoll.core.collector import paused
        >>> with paused():
        ...     print(gc.isenabled())
        False
        >>> gc.isenabled()
        True
    """
    runs = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if runs:
            gc.enable()


def leave_out_existing() -> None:
    """Make the collector ignore all existing objects, also at the end of the process, where it takes longest.

    Only for processes that have done nothing but import: existing garbage would never be freed.
    """
    gc.freeze()
    # PyTorch's compiler imports Triton, which complains at exit about objects that were not collected.
    if "triton" in sys.modules:
        atexit.register(gc.unfreeze)
