"""State that all code of a process shares: random streams, and PyTorch's settings."""

from __future__ import annotations

import pickle
import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

from atoll.core.devices import attention, set_attention, tf32_convolutions
from atoll.core.errors import warn
from atoll.core.threads import threads

_NUMPY_SEEDS = 2**32
_RUN = threading.RLock()  # a callback may start another run, in the same thread


def uses_gpu() -> bool:
    """Whether this process has used a GPU."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def seed_streams(seed: int) -> None:
    """Seed the process's random streams: those of torch, numpy and random."""
    # `torch.manual_seed` also seeds GPUs; without a GPU, it formats three tracebacks in case one appears.
    torch.default_generator.manual_seed(seed)
    if uses_gpu():
        torch.cuda.manual_seed_all(seed)
    np.random.seed(seed % _NUMPY_SEEDS)
    random.seed(seed)


RandomStreams = tuple[Any, ...]  # the states of the process's random streams


def random_streams(others: bool = True) -> RandomStreams:
    """The states of the process's random streams.

    Args:
        others: Whether to also read those of numpy and random, which takes fifty times as long.
    """
    gpus = torch.cuda.get_rng_state_all() if uses_gpu() else []
    return torch.get_rng_state(), gpus, (np.random.get_state(), random.getstate()) if others else None


def equal_streams(first: RandomStreams, second: RandomStreams) -> bool:
    """Whether two results of `random_streams` are equal: nothing was drawn in between."""
    (cpu, gpus, others), (cpu2, gpus2, others2) = first, second
    return (
        all(map(torch.equal, (cpu, *gpus), (cpu2, *gpus2)))
        and len(gpus) == len(gpus2)
        and pickle.dumps(others) == pickle.dumps(others2)
    )


def set_random_streams(states: RandomStreams) -> None:
    """Set the process's random streams to states that `random_streams` returned."""
    torchs, gpus, others = states
    torch.set_rng_state(torchs)
    if gpus:
        torch.cuda.set_rng_state_all(gpus)
    if others is not None:
        np.random.set_state(others[0])
        random.setstate(others[1])


@contextmanager
def streams_kept() -> Iterator[None]:
    """Restore the process's random streams after the block."""
    states = random_streams()
    try:
        yield
    finally:
        set_random_streams(states)


@contextmanager
def seeded_streams(seed: int) -> Iterator[None]:
    """Seed the streams within the block, and restore the process's own afterwards."""
    with streams_kept():
        seed_streams(seed)
        yield


@contextmanager
def settings_kept() -> Iterator[None]:
    """Restore PyTorch's settings after the block.

    These are gradient mode, number of threads, default floating-point type, and choice of kernels.
    """
    precision = _matmul_precision()
    floats, kernels = torch.get_default_dtype(), torch.get_deterministic_debug_mode()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    searched, tf32, attends = torch.backends.cudnn.benchmark, tf32_convolutions(), attention()
    by_onednn = torch.backends.mkldnn.enabled
    with torch.set_grad_enabled(torch.is_grad_enabled()), threads(torch.get_num_threads()):
        try:
            yield
        finally:
            torch.set_default_dtype(floats)
            _multiply_with(precision)
            torch.set_deterministic_debug_mode(kernels)
            torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
            torch.backends.cudnn.benchmark = searched
            torch.backends.mkldnn.enabled = by_onednn
            set_attention(attends)
            if tf32 is not None and tf32_convolutions() != tf32:
                torch.backends.cudnn.allow_tf32 = tf32


def _matmul_precision() -> str:
    """Precision of float32 matrix products; empty if it is set for each backend separately."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # PyTorch does not mix the two ways to set it
        return ""


def _multiply_with(precision: str) -> None:
    if precision and _matmul_precision() not in ("", precision):
        torch.set_float32_matmul_precision(precision)


@contextmanager
def process_kept(seed: int | None = None) -> Iterator[None]:
    """Restore the streams and the settings after the block, in which the user's code runs.

    Args:
        seed: What the streams are seeded with within the block; None goes on with the process's own.
    """
    with settings_kept(), streams_kept():
        if seed is not None:
            seed_streams(seed)
        yield


@contextmanager
def standard_settings() -> Iterator[None]:
    """Set PyTorch for a run or an evaluation within the block, independently of the caller's settings.

    Gradients are recorded, floats have 32 bits, also in matrix products, and new tensors lie on the CPU.
    """
    with settings_kept(), torch.inference_mode(False), torch.enable_grad(), ExitStack() as contexts:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                contexts.enter_context(torch.autocast(device, enabled=False))
        if torch.get_default_device().type != "cpu":  # else not, because it slows each function of PyTorch
            contexts.enter_context(torch.device("cpu"))
        torch.set_default_dtype(torch.float32)
        _multiply_with("highest")
        yield


@contextmanager
def process_for_training() -> Iterator[None]:
    """Reserve the process for one run within the block, with `standard_settings`; other threads wait."""
    if not _RUN.acquire(blocking=False):
        warn("waits for the run of another thread; use processes to train at once")
        _RUN.acquire()
    try:
        with standard_settings():
            yield
    finally:
        _RUN.release()
