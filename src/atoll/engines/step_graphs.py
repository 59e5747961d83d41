"""A client's step as a CUDA graph: its kernels are recorded once a round, and replayed with one call.

A step of a small network consists of hundreds of kernels, each of which takes the GPU less time than Python takes
to start it. A replay starts all of them at once, and computes the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from atoll.components.base import Batch
from atoll.components.component import replays
from atoll.components.training import TrainOptions
from atoll.core.devices import make_stream, upload
from atoll.core.errors import UserError
from atoll.core.text import first_line
from atoll.methods.method import Method

if TYPE_CHECKING:
    from atoll.engines.client import Client


class Recording(Protocol):
    """Recorded work."""

    def replay(self) -> None:
        """Do the work again, on the memory with which it was recorded."""


class Recorder:
    """Records work on a GPU as CUDA graphs, which use the same memory one after another.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _recording_stream(device)
        self._device = device

    def random_state(self) -> Tensor:
        """State of the GPU's random stream."""
        return torch.cuda.get_rng_state(self._device)

    def provide(self, make: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        """Provide memory on the GPU for what recorded work takes from the host; also return what it takes first."""
        first = make()
        return torch.empty(first.shape, dtype=first.dtype, device=self._device), first

    def record(self, work: Callable[[], None]) -> Recording:
        """Record the kernels of ``work`` without computing them."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):  # a GPU does not record its default stream
            # Another thread may fold the last client's update meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        return graph


class StepGraph:
    """The steps of one client in one round: the first one is computed as usual, the second one is recorded.

    Only full batches are replayed, and none if the networks draw random numbers, as dropout does: a replay would
    draw others. Every client in every round is recorded anew, because its components may hold other tensors.

    Args:
        recorder: Records the step.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.start()

    def start(self) -> None:
        """Begin another client or round."""
        # What was recorded before stays until the next recording, which uses its memory again.
        self._recorded = False
        self._random: Tensor | None = None

    def take(self, client: Client, batch: Batch) -> bool:
        """Take a step of the client by a replay, if it can be replayed.

        Returns:
            False if the step is still to be taken.

        Raises:
            UserError: The step cannot be recorded.
        """
        if len(batch.indices) != client.setting.train.batch_size:
            return False
        if not self._recorded and not self._can_record():
            return False
        client.prepare(batch)
        if self._recorded:
            self._batch.indices = batch.indices
            for static, tensor in zip(_tensors(self._batch), _tensors(batch), strict=True):
                static.copy_(tensor)
            for static, make in self._remade:
                static.copy_(upload(make(), static.device))
            client.context.steps += 1
        else:
            self._record(client, batch)
        self._recording.replay()
        client.note({name: loss.clone() for name, loss in self._losses.items()})
        return True

    def _can_record(self) -> bool:
        """Whether the round's first step has loaded the kernels and made the optimiser's state, without draws."""
        state = self._recorder.random_state()
        if self._random is None:
            self._random = state
            return False
        return torch.equal(state, self._random)

    def _record(self, client: Client, batch: Batch) -> None:
        images = {name: image.clone() for name, image in batch.images.items()}
        labels = None if batch.labels is None else batch.labels.clone()
        self._batch = Batch(batch.indices, images, labels, batch.epoch)
        self._remade: list[tuple[Tensor, Callable[[], Tensor]]] = []
        made: list[Tensor] = []

        def remade(make: Callable[[], Tensor]) -> Tensor:
            static, first = self._recorder.provide(make)
            self._remade.append((static, make))
            made.append(first)
            return static

        def step() -> None:
            client.optimizer.zero_grad(set_to_none=True)
            with client.autocast():
                loss, self._losses = client.losses(self._batch, client.passes(self._batch))
            if loss.requires_grad:
                torch.autograd.backward(loss)
            client.optimizer.step()
            client.after_step()

        try:
            with _recordable(client.optimizer), client.context.recorded(remade):
                recording = self._recorder.record(step)
        except RuntimeError as error:
            raise UserError(
                f"train.cuda_graphs: a step cannot be recorded ({first_line(error)}); leave out train.cuda_graphs"
            ) from error
        self._recording, self._recorded = recording, True
        for (static, _), first in zip(self._remade, made, strict=True):
            static.copy_(upload(first, static.device))


@cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all recordings in this process: cuBLAS keeps tens of MiB of memory for each."""
    return make_stream(device)


def step_graph(method: Method, train: TrainOptions, device: torch.device) -> StepGraph | None:
    """Make the graph of a client's steps; None if there is none to make."""
    wanted = train.cuda_graphs and can_replay(method, train)
    return StepGraph(Recorder(device)) if wanted and device.type == "cuda" else None


def can_replay(method: Method, train: TrainOptions) -> bool:
    """Whether a step of the method is the same kernels on the same memory each time, as its components declare."""
    alike = train.accumulate == 1 and not train.checkpoint_gradients
    return alike and all(replays(type(component)) for component in method.components)


@contextmanager
def _recordable(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let Adam's step be recorded; its fused kernel, which counts the steps on the GPU, is the same."""
    groups = [group for group in optimizer.param_groups if group.get("fused") and "capturable" in group]
    for group in groups:
        group["capturable"] = True
    yield
    for group in groups:
        group["capturable"] = False


def _tensors(batch: Batch) -> list[Tensor]:
    return [*batch.images.values(), *([] if batch.labels is None else [batch.labels])]
