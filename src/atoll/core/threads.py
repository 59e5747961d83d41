"""Number of CPU threads that a computation uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute with the given number of CPU threads inside the block, and restore the caller's number afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def one_thread(device: torch.device) -> AbstractContextManager[None]:
    """Compute with one CPU thread inside the block, if the device is the CPU.

    Long loops of small operations need this: a second thread speeds them up little, slows them down tenfold on a
    busy machine, and would make the result depend on the number of threads.
    """
    return threads(1) if device.type == "cpu" else nullcontext()
