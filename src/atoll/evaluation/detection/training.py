"""Training of a detector: SGD in seeded steps. On a CPU, a resumed training ends with the same bytes.

On a GPU, the last bits may differ each time, because torchvision's kernel for the gradient of RoIAlign adds in no
fixed order. PyTorch's deterministic kernels are not used: torchvision would then replace RoIAlign by Python code
that it compiles with Triton, and without a C compiler no training would start.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from atoll.core.devices import upload
from atoll.core.errors import RunError
from atoll.core.rng import derive_seed, stream
from atoll.core.tree import Tree, clone
from atoll.data.detection.objects import DetectionSet
from atoll.evaluation.detection.options import DetectionOptions

Losses = dict[str, float]


@dataclass
class DetectorTraining:
    """A detector in training.

    Every random draw comes from a stream of the seed and the step, so the steps after a checkpoint are those that
    an uninterrupted training takes.

    Args:
        detector: torchvision's detector, whose loss is a dict, on its device.
        data: The training images.
        channels: Channels of the images.
        options: The options.

    Attributes:
        step: Number of complete steps.
        losses: Mean of each loss by epoch, including the unfinished epoch, for all steps whose losses have been
            read.
    """

    detector: nn.Module
    data: DetectionSet
    channels: int
    options: DetectionOptions
    step: int = 0
    losses: list[Losses] = field(default_factory=list)

    _unread: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self._parameters = [one for one in self.detector.parameters() if one.requires_grad]
        self._optimizer = torch.optim.SGD(
            self._parameters,
            lr=self.options.lr,
            momentum=self.options.momentum,
            weight_decay=self.options.weight_decay,
        )
        annotated = torch.tensor(self.data.with_objects())
        kept = max(1, round(self.options.fraction * len(annotated)))
        draws = stream(self.options.seed, "detection-fraction")
        self._rows = annotated[torch.randperm(len(annotated), generator=draws)[:kept].sort().values]

    @property
    def images(self) -> int:
        """Number of training images."""
        return len(self._rows)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch; the last batch may be smaller."""
        return math.ceil(self.images / self.options.batch_size)

    @property
    def steps(self) -> int:
        """Steps of the whole training."""
        return self.options.epochs * self.steps_per_epoch

    def state(self) -> Tree:
        """Return everything that a later process needs to continue.

        Raises:
            RunError: The loss is not finite.
        """
        self.read_losses()
        momenta = [self._optimizer.state[one].get("momentum_buffer") for one in self._parameters]
        return clone(
            {
                "step": self.step,
                "losses": self.losses,
                "model": self.detector.state_dict(),
                "momenta": momenta,
            }
        )

    def load(self, state: Tree) -> None:
        """Continue from the state of an earlier process."""
        self.step, self.losses = state["step"], state["losses"]
        self.detector.load_state_dict(state["model"])
        for one, momentum in zip(self._parameters, state["momenta"], strict=True):
            if momentum is not None:
                self._optimizer.state[one]["momentum_buffer"] = momentum.to(one.device)

    def run(self, after_step: Callable[[DetectorTraining], None]) -> None:
        """Take all remaining steps.

        Args:
            after_step: Called after each step.

        Raises:
            RunError: The loss is not finite.
        """
        self.detector.train()
        device = self._parameters[0].device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            while self.step < self.steps:
                batch = [self._example(row, flip) for row, flip in self._batch()]
                self.read_losses()  # now, because a GPU may have computed while the images were decoded
                self._take_step(batch, device)
                self.step += 1
                after_step(self)
            self.read_losses()

    def read_losses(self) -> None:
        """Read the losses of the last step, unless they have been read; this waits for a GPU.

        Raises:
            RunError: The loss is not finite.
        """
        if not self._unread:
            return
        values = torch.stack(list(self._unread.values())).tolist()
        losses = dict(zip(self._unread, values, strict=True))
        if not math.isfinite(losses["loss"]):
            raise RunError(
                f"the detector's loss is not finite in step {self.step}: its training diverged; lower lr, or "
                "raise warmup"
            )
        self._record(losses)
        self._unread = {}

    def _take_step(self, batch: list[tuple[Tensor, dict[str, Tensor]]], device: torch.device) -> None:
        """Take one step, whose losses are read later."""
        for group in self._optimizer.param_groups:
            group["lr"] = self.options.rate(self.step, self.steps)
        images = [upload(image, device) for image, _ in batch]
        targets = [{name: upload(one, device) for name, one in target.items()} for _, target in batch]
        # torchvision samples anchors and proposals with the default generator.
        torch.manual_seed(derive_seed(self.options.seed, "detection-step", self.step))
        losses: dict[str, Tensor] = self.detector(images, targets)
        total = torch.stack(list(losses.values())).sum()
        self._optimizer.zero_grad()
        torch.autograd.backward(total)
        self._optimizer.step()
        self._unread = {name: loss.detach() for name, loss in {"loss": total, **losses}.items()}

    def _batch(self) -> list[tuple[int, bool]]:
        """Draw the rows of the current step, and whether each is flipped."""
        epoch, place = divmod(self.step, self.steps_per_epoch)
        order = torch.randperm(self.images, generator=stream(self.options.seed, "detection-order", epoch))
        rows = self._rows[order[place * self.options.batch_size :][: self.options.batch_size]]
        flips = torch.rand(len(rows), generator=stream(self.options.seed, "detection-flip", self.step)) < 0.5
        return [(int(row), bool(flip) and self.options.flip) for row, flip in zip(rows, flips, strict=True)]

    def _example(self, row: int, flip: bool) -> tuple[Tensor, dict[str, Tensor]]:
        image = self.data.pixels(row, self.channels).float() / 255
        target = self.data.target(row, self.options.masks)
        return flipped(image, target) if flip else (image, target)

    def _record(self, losses: Losses) -> None:
        """Update the means of the last step's epoch."""
        place = (self.step - 1) % self.steps_per_epoch
        if place == 0:
            self.losses.append(losses)
            return
        means = self.losses[-1]
        self.losses[-1] = {name: means[name] + (losses[name] - means[name]) / (place + 1) for name in means}


def flipped(image: Tensor, target: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Flip an image with its boxes and masks horizontally.

    Shape:
        - image: (C, H, W); target: see `atoll.data.detection.objects.DetectionSet.target`
    """
    boxes = target["boxes"].clone()
    boxes[:, [0, 2]] = image.shape[-1] - target["boxes"][:, [2, 0]]
    masks = {"masks": target["masks"].flip(-1)} if "masks" in target else {}
    return image.flip(-1), {**target, "boxes": boxes, **masks}
