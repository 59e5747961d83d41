"""The recipe's ``[engine]`` section: the hardware that a run uses, and its checkpoints."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated

import torch

from atoll.core.config import Options
from atoll.core.devices import check_device, find_device
from atoll.core.schema import Above, AtLeast, AtMost, Count


@dataclass(frozen=True)
class EngineOptions(Options, section="engine"):
    """The recipe's ``[engine]`` section.

    Attributes:
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``…, or ``"auto"`` (a GPU if there is one).
        workers: Number of processes that train clients in parallel; 0 for one per core. The result does not
            depend on it.
        threads: CPU threads of each worker. The last bits of the result depend on it.
        decoders: Number of processes that read and decode the images of a streamed split (``data.memory_gib``)
            ahead of the training, with ``workers = 1``; 0 to decode between the steps. The result does not depend
            on it.
        channels_last: Use the channels-last memory layout of images and convolutions. The last bits of the result
            depend on it.
        checkpoint_every: Rounds between checkpoints.
    """

    device: str = "auto"
    workers: Annotated[int, AtLeast(0), AtMost(1024)] = 1
    threads: Annotated[int, Above(0), AtMost(1024)] = 1
    decoders: Annotated[int, AtLeast(0), AtMost(1024)] = 0
    channels_last: bool = False
    checkpoint_every: Count = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_device(self.device, "engine.device")

    def find_device(self) -> torch.device:
        """Return the PyTorch device.

        Raises:
            UserError: The recipe requires a GPU, and there is none.
        """
        return find_device(self.device, "engine.device")

    def count_workers(self, cohort: int) -> int:
        """Return the number of worker processes for a cohort of this size."""
        wanted = self.workers or max(1, (os.cpu_count() or 1) // self.threads)
        return max(1, min(wanted, cohort))
