"""Options of detection: the network, its training and the images."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from atoll.core.config import Options
from atoll.core.devices import check_device
from atoll.core.errors import UserError
from atoll.core.schema import AtLeast, Below, Count, Positive, Share

DECAYS: dict[str, Callable[[float], float]] = {
    "step": lambda done: (1.0, 0.1, 0.01)[(done >= 2 / 3) + (done >= 8 / 9)],
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "constant": lambda done: 1.0,
}


@dataclass(frozen=True)
class DetectionOptions(Options):
    """Options of detection; the defaults are the 1× schedule of Dec-SSL's Table 1 and torchvision's network.

    Attributes:
        masks: Learn and measure masks too (Mask R-CNN instead of Faster R-CNN); needs annotated masks.
        size: Shorter side in pixels to which the images are resized.
        max_size: Limit of the longer side in pixels; an image that would exceed it is resized to it instead.
        fpn_width: Channels of the feature pyramid; by default half the encoder's width, at most 256.
        head_width: Width of the box head's two layers; by default four times the pyramid's.
        rois: Number of proposals of an image that the heads learn from.
        norm: ``"train"`` trains the encoder's BatchNorm; ``"frozen"`` keeps its statistics, scales and shifts.
        epochs: Number of passes over the training images.
        batch_size: Number of images in a step.
        lr: Learning rate of SGD after the warm-up.
        momentum: Momentum of SGD.
        weight_decay: L2 penalty.
        schedule: Schedule of the learning rate: ``"step"`` (a tenth after 2/3 of the steps, a hundredth after 8/9),
            ``"cosine"`` (to 0) or ``"constant"``.
        warmup: Share of the steps over which the rate rises linearly from 0.
        flip: Flip images horizontally with probability 1/2.
        fraction: Share of the annotated training images that is used, drawn with the seed.
        seed: Seed of the new layers' weights, the images' order, flips and the sampling of proposals.
        train_split: Name of the training split.
        test_split: Name of the test split; by default ``test``, or ``val`` if there is no ``test``.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``…, or ``"auto"`` (a GPU if there is one).
        threads: Number of CPU threads. The last bits of the result depend on it.
        save_every: Steps between checkpoints. The result does not depend on it.
    """

    masks: bool = False
    size: Count = 800
    max_size: Count = 1333
    fpn_width: Count | None = None
    head_width: Count | None = None
    rois: Count = 512
    norm: Literal["train", "frozen"] = "train"
    epochs: Count = 12
    batch_size: Count = 16
    lr: Positive = 0.02
    momentum: Annotated[float, AtLeast(0), Below(1)] = 0.9
    weight_decay: Annotated[float, AtLeast(0)] = 1e-4
    schedule: Literal["step", "cosine", "constant"] = "step"
    warmup: Annotated[float, AtLeast(0), Below(1)] = 0.02
    flip: bool = True
    fraction: Share = 1.0
    seed: Annotated[int, AtLeast(0)] = 0
    train_split: str = "train"
    test_split: str | None = None
    device: str = "auto"
    threads: Count = 1
    save_every: Count = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        check_device(self.device, "device")
        if self.max_size < self.size:
            raise UserError(
                f"max_size = {self.max_size}, the limit of the longer side, is below size = {self.size}, the "
                "shorter side; raise it"
            )

    def rate(self, step: int, steps: int) -> float:
        """Return the learning rate of a step, counted from 0.

        Example:
            >>> from atoll.evaluation.detection.options import DetectionOptions
            >>> options = DetectionOptions(lr=1.0, warmup=0.1)
            >>> [options.rate(step, 90) for step in (0, 8, 59, 60, 80)]
            [0.1111111111111111, 1.0, 1.0, 0.1, 0.01]
        """
        rising = int(self.warmup * steps)
        if step < rising:
            return self.lr * (step + 1) / rising
        return self.lr * DECAYS[self.schedule](step / steps)
