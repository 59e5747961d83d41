"""CPU threads: how many a computation uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute with so many CPU threads, and give back what the caller had."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """One CPU thread inside, if the work is on the CPU at all.

    For long loops of tiny operations: a second thread gains them little, costs tenfold on a busy machine, and
    would let the result depend on the number of threads.
    """
    if device.type != "cpu":
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
