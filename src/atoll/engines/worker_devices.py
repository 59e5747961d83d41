"""The devices of a run's worker processes; in a command, several processes share a GPU if networks are small."""

from __future__ import annotations

import math
import subprocess

import torch

from atoll.core import processes
from atoll.engines.federation import RESIDENT_BYTES, Federation

MOST = 8  # processes on a GPU
WEIGHTS = 1_000_000  # most weights of networks that are small
PIXELS = 512 * 32 * 32  # most pixels of a batch of small images, in each channel
MEMORY = 3 * 2**30  # bytes of a GPU for each process, beside the images that it keeps there


def worker_devices(federation: Federation) -> list[torch.device]:
    """Return the device of each worker process of a run; a single one stands for the process itself.

    Raises:
        UserError: The recipe requires a GPU that is not there, or devices of several kinds.
    """
    engine, cohort = federation.recipe.engine, federation.setting.cohort_size
    several = engine.workers == "auto" and cohort > 1 and _may_share(federation)
    return engine.worker_devices(cohort, _processes(federation) if several else 1)


def _may_share(federation: Federation) -> bool:
    """Whether several processes may share the GPU, and have something to gain: the kernels are short.

    Only in a command, because a Python script that is not prepared for processes would start again in each.
    """
    recipe = federation.recipe
    if not processes.in_command or federation.device.type != "cuda" or recipe.trains_with_own_code:
        return False
    if recipe.engine.at_once > 1 or recipe.engine.decoders or recipe.engine.devices:
        return False
    _, height, width = recipe.image_shape
    weights = sum(weight.numel() for weight in federation.networks.parameters())
    small = weights <= WEIGHTS and recipe.train.batch_size * height * width <= PIXELS
    return small and _admits_several()


def _admits_several() -> bool:
    """Whether the GPUs' compute mode admits several processes."""
    command = ["nvidia-smi", "--query-gpu=compute_mode", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return False
    return set(said.split()) == {"Default"}


def _processes(federation: Federation) -> int:
    memory = torch.cuda.get_device_properties(federation.device).total_memory
    images = min(RESIDENT_BYTES, math.prod(federation.images.images.shape))
    cores = processes.num_cores() // federation.recipe.engine.threads
    return min(MOST, cores, memory // (MEMORY + images))
