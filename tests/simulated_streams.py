"""CUDA streams of the simulated GPU: the stream that wrote each memory last, and who may read it.

A stream may read what it wrote itself, and what another one wrote before it, or the host, waited for that one.
Everything else is a race on a real GPU, and noted. Not noted are writes over what another stream still reads, and
freed memory that another stream gets.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor


class Stream:
    """A stream; 0 is the default one."""

    count = 0

    def __init__(self, device=None) -> None:
        Stream.count += 1
        self.number = Stream.count

    def wait_stream(self, other: Stream) -> None:
        """Read what the other stream has written until now."""
        Streams.waited[self.number, other.number] = Streams.time


class Streams:
    """What is known of all streams."""

    default = Stream()
    current = default
    time = 0
    written: ClassVar[dict[int, tuple[int, int]]] = {}  # by address: the stream, and when
    waited: ClassVar[dict[tuple[int, int], int]] = {}
    synchronised: ClassVar[dict[int, int]] = {}  # when the host waited for a stream
    races: ClassVar[list[str]] = []
    reads = 0  # of what another stream wrote


def read(tensors: list[Tensor], what: str) -> None:
    """Check that the current stream may read tensors, which are on the host's side of the simulated ones."""
    now = Streams.current.number
    for tensor in tensors:
        writer, when = Streams.written.get(_address(tensor), (now, 0))
        if writer == now:
            continue
        Streams.reads += 1
        if when > max(Streams.waited.get((now, writer), -1), Streams.synchronised.get(writer, -1)):
            Streams.races.append(f"stream {now} reads what stream {writer} wrote: {what}")


def write(tensors: list[Tensor]) -> None:
    """Note that the current stream wrote tensors."""
    Streams.time += 1
    for tensor in tensors:
        if address := _address(tensor):  # tensors without elements have no memory, and the address 0
            Streams.written[address] = (Streams.current.number, Streams.time)


def synchronise() -> None:
    """Note that the host waited for the current stream."""
    Streams.synchronised[Streams.current.number] = Streams.time


def install() -> None:
    """Give this process streams, for good."""
    torch.cuda.Stream = Stream
    torch.cuda.stream = _entered
    torch.cuda.current_stream = lambda device=None: Streams.current


@contextmanager
def _entered(stream: Stream):
    before, Streams.current = Streams.current, stream
    try:
        yield
    finally:
        Streams.current = before


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
