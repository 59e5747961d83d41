"""The recipe's ``[engine]`` section: where and how a run is computed."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Annotated

import torch

from atoll.core.config import Options
from atoll.core.errors import UserError
from atoll.core.schema import AtLeast, Count


@dataclass(frozen=True)
class EngineOptions(Options, section="engine"):
    """Where a simulation runs.

    Attributes:
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``…, or ``"auto"`` (a GPU if there is one).
        workers: Processes that train clients side by side; 0: one for each core. The result is the same.
        threads: CPU threads of each worker. Part of the result to the last bit.
        channels_last: Memory layout of images and convolutions. Part of the result to the last bit.
        checkpoint_every: Rounds between checkpoints.
    """

    device: str = "auto"
    workers: Annotated[int, AtLeast(0)] = 1
    threads: Count = 1
    channels_last: bool = False
    checkpoint_every: Count = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.device != "auto":
            with contextlib.suppress(RuntimeError):
                if torch.device(self.device).type in ("cpu", "cuda"):
                    return
            raise UserError(f"engine.device is {self.device!r}; use auto, cpu or cuda")

    def find_device(self) -> torch.device:
        """The device itself.

        Raises:
            UserError: A GPU is asked for, and there is none.
        """
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        device = torch.device(self.device)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise UserError("engine.device is cuda, and PyTorch sees no GPU here; use engine.device=cpu")
        return device

    def count_workers(self, cohort: int) -> int:
        """Worker processes for a cohort of this size."""
        wanted = self.workers or max(1, (os.cpu_count() or 1) // self.threads)
        return max(1, min(wanted, cohort))
