"""Jobs of a round, their results, and the executors that run them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor

from atoll.aggregation.secure_sum import SecureSum
from atoll.components.messages import Message, Slices


@dataclass(frozen=True)
class Job:
    """Task of one client in a round.

    Attributes:
        message: Result of `Method.send`.
    """

    message: Message

    @property
    def client(self) -> int:
        """The client's id."""
        return self.message["client"]

    @property
    def round(self) -> int:
        """Number of the round, from 1."""
        return self.message["round"]


@dataclass(frozen=True)
class Result:
    """Result of a job.

    Attributes:
        client: The client's id.
        update: The update, not yet checked; None if there is none.
        lost: Reason why there is no update.
        reset: Whether the client state is lost, too; the client then counts as one that has not taken part yet.
        sent: Whether the message was sent to the client.
    """

    client: int
    update: object = None
    lost: str = ""
    reset: bool = False
    sent: bool = True


@dataclass
class Total:
    """Sum of the terms of a round's clients (see `atoll.aggregation.secure_sum`).

    Attributes:
        numbers: The sum modulo 2³², of shape (d,), in int64; None if too few clients stayed.
        clients: The clients whose terms are in it.
        lost: Reasons why there is no term, by client.
        sent: The clients to which the message was sent.
        bytes_up: Bytes that the clients sent.
    """

    numbers: Tensor | None = None
    clients: list[int] = field(default_factory=list)
    lost: dict[int, str] = field(default_factory=dict)
    sent: set[int] = field(default_factory=set)
    bytes_up: int = 0


@runtime_checkable
class SumExecutor(Protocol):
    """An executor that can learn the sum of the clients' terms, but no single term."""

    def total(self, jobs: Sequence[Job], aggregation: SecureSum, size: int, least: float) -> Total:
        """Run the jobs; return the sum of at least ``least`` terms, of ``size`` numbers each."""
        ...


class Executor(Protocol):
    """Runs jobs in this process, in worker processes, or at remote nodes."""

    def start(self, constants: Slices) -> None:
        """Prepare for jobs; ``constants`` are sent to every client once."""
        ...

    def run(
        self, jobs: Sequence[Job], progress: Callable[[int], None] | None
    ) -> Generator[Result, None, None]:
        """Yield results in the order of the jobs; the caller may keep updates if `keeps_updates`."""
        ...
