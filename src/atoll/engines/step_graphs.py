"""A client's step as a CUDA graph: its kernels are recorded once a round, and replayed with one call.

A step of a small network consists of hundreds of kernels, each of which takes the GPU less time than Python takes
to start it. A replay starts all of them at once, and computes the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from atoll.components.base import Batch
from atoll.components.component import replays
from atoll.components.training import TrainOptions
from atoll.core import collector
from atoll.core.devices import make_stream, upload
from atoll.core.errors import UserError
from atoll.core.process_state import RandomStreams, equal_streams, random_streams
from atoll.core.text import first_line
from atoll.methods.method import Method

if TYPE_CHECKING:
    from atoll.engines.client import Client

LEAST = 5  # steps of a round that are worth a recording, which takes about as long as a step
OLDEST = (2, 9)  # PyTorch: before, scatter's deterministic kernels upload, which cannot be recorded
UNLIKE = "a loss calls context.from_host differently from step to step"


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
        self._used = False

    def record(self, work: Callable[[], None]) -> Recording:
        """Record the kernels of ``work`` without computing them."""
        if not self._used:  # the steps so far keep memory in a cache, which no recording can take
            torch.cuda.empty_cache()
            self._used = True
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        # A GPU does not record its default stream. The collector could free another graph meanwhile.
        with torch.cuda.stream(self._stream), collector.paused():
            # Another thread may fold the last client's update meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with suppress(RuntimeError):  # which would only say that there was an error before
                    graph.capture_end()
                raise
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
        self.start(0)

    def start(self, steps: int) -> None:
        """Begin another client or round; ``steps`` is the number of its steps."""
        # What was recorded before stays until the next recording, which uses its memory again.
        self.recorded = False
        self._worth = steps >= LEAST
        self._random: RandomStreams | None = None
        self._statics: list[Tensor] = []

    def take(self, client: Client, batch: Batch) -> bool:
        """Take a step of the client by a replay, if it can be replayed.

        Returns:
            False if the step is still to be taken.

        Raises:
            UserError: The step cannot be recorded.
        """
        client.context.host = None  # the first step is over
        if not self._worth or len(batch.indices) != client.setting.train.batch_size:
            return False
        if not self.recorded and not self._prepared(client):
            return False
        client.prepare(batch)
        if self.recorded:
            self._batch.indices = batch.indices
            for static, tensor in zip(_tensors(self._batch), _tensors(batch), strict=True):
                static.copy_(tensor)
            for static, make in zip(self._statics, self._made_by, strict=True):
                static.copy_(upload(make(), static.device))
            client.context.steps += 1
        else:
            self._record(client, batch)
        self._recording.replay()
        client.note({name: loss.clone() for name, loss in self._losses.items()})
        return True

    def _prepared(self, client: Client) -> bool:
        """Whether the round's first step is done: it loads kernels, and makes the optimiser's state.

        It also makes the memory of what a step takes from the host: memory of a recording may be written by kernels
        before the one that reads it.
        """
        state = random_streams()
        if self._random is None:
            self._random = state
            client.context.host = self._keep
            return False
        self._worth = equal_streams(state, self._random)  # else the networks draw random numbers
        return self._worth

    def _keep(self, make: Callable[[], Tensor], device: torch.device) -> Tensor:
        made = upload(make(), device)
        self._statics.append(made.clone())
        return made

    def _record(self, client: Client, batch: Batch) -> None:
        images = {name: image.clone() for name, image in batch.images.items()}
        labels = None if batch.labels is None else batch.labels.clone()
        self._batch = Batch(batch.indices, images, labels, batch.epoch)
        self._made_by: list[Callable[[], Tensor]] = []
        made: list[Tensor] = []

        def provide(make: Callable[[], Tensor], device: torch.device) -> Tensor:
            first = make()
            if len(made) == len(self._statics) or not _alike(first, self._statics[len(made)]):
                raise RuntimeError(UNLIKE)
            self._made_by.append(make)
            made.append(first)
            return self._statics[len(made) - 1]

        def step() -> None:
            client.optimizer.zero_grad(set_to_none=True)
            with client.autocast():
                loss, self._losses = client.losses(self._batch, client.passes(self._batch))
            if loss.requires_grad:
                torch.autograd.backward(loss)
            client.optimizer.step()
            client.after_step()

        before = _buffers(client)
        client.context.host = provide
        try:
            with _recordable(client.optimizer):
                recording = self._recorder.record(step)
        except RuntimeError as error:
            raise _refusal(first_line(error)) from error
        finally:
            client.context.host = None
        if len(made) < len(self._statics):
            raise _refusal(UNLIKE)
        if _buffers(client) != before:
            raise _refusal("a network replaces its buffers, and a replay would not")
        for static, first in zip(self._statics, made, strict=True):
            static.copy_(upload(first, static.device))
        self._recording, self.recorded = recording, True


def step_graph(method: Method, train: TrainOptions, device: torch.device) -> StepGraph | None:
    """Make the graph of a client's steps; None if there is none to make."""
    return StepGraph(Recorder(device)) if device.type == "cuda" and can_replay(method, train) else None


def can_replay(method: Method, train: TrainOptions) -> bool:
    """Whether steps are to be recorded, and are the same kernels on the same memory each time.

    The latter is what the method's components declare.
    """
    if not train.cuda_graphs:
        return False
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    alike = version >= OLDEST and train.accumulate == 1 and not train.checkpoint_gradients
    return alike and all(replays(type(component)) for component in method.components)


@cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all recordings in this process: cuBLAS keeps tens of MiB of memory for each."""
    return make_stream(device)


@contextmanager
def _recordable(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let Adam's step be recorded; its fused kernel, which counts the steps on the GPU, is the same."""
    groups = [group for group in optimizer.param_groups if group.get("fused") and "capturable" in group]
    for group in groups:
        group["capturable"] = True
    try:
        yield
    finally:
        for group in groups:
            group["capturable"] = False


def _buffers(client: Client) -> list[int]:
    networks = client.networks_by_name.values()
    return [buffer.data_ptr() for network in networks for buffer in network.buffers()]


def _alike(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and first.dtype == second.dtype


def _tensors(batch: Batch) -> list[Tensor]:
    return [*batch.images.values(), *([] if batch.labels is None else [batch.labels])]


def _refusal(reason: str) -> UserError:
    return UserError(f"train.cuda_graphs: a step cannot be recorded ({reason}); leave out train.cuda_graphs")
