"""Python's cyclic garbage collector, which imports of PyTorch and Atoll keep busy for nothing."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """Pause the collector while modules are imported.

    They create about a million objects, which stay, and the collector goes through all of them again whenever
    their number has grown by a quarter.

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
    """Let the collector leave out all objects that exist, also at the end of the process, where it takes longest.

    Only for processes that have done nothing but import: what is garbage already would stay.
    """
    gc.freeze()
    # PyTorch's compiler imports Triton, which complains at the end of objects that were not collected.
    if "triton" in sys.modules:
        atexit.register(gc.unfreeze)
