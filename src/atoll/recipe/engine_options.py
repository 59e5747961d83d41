"""The recipe's ``[engine]`` section: the hardware that a run uses, and its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch

from atoll.core.config import Options
from atoll.core.devices import check_device, find_device, find_devices, repeat_results
from atoll.core.errors import UserError
from atoll.core.processes import num_cores
from atoll.core.schema import Above, AtLeast, AtMost, Count


@dataclass(frozen=True)
class EngineOptions(Options, section="engine"):
    """The recipe's ``[engine]`` section.

    Attributes:
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``…, or ``"auto"`` (a GPU if there is one).
        devices: Devices to which the workers are assigned in turn, in place of `device`: a list such as
            ``["cuda:0", "cuda:1"]``, or ``"auto"`` (all GPUs). The first one also evaluates. All must be of one
            kind; the result is the same as on one device. By default, all workers are on `device`.
        workers: Number of processes that train clients in parallel, at least one for each of `devices`; 0 starts as
            many as the available cores divided by `threads`. ``"auto"`` means 1. In a command on a GPU, it means up
            to 8 if the networks are small and would leave the GPU idle: at most a million weights, and batches of
            at most as many pixels as 512 images of 32 × 32. The result does not depend on it.
        stack: Number of clients that one process trains at once, with their encoders stacked into one along an axis
            of clients. This is for small networks, which leave a GPU idle. It takes the memory of as many clients,
            and these encoders compute in float32. The weights are those of clients that train one by one, up to
            rounding. Flower's engines ignore it.
        streams: Number of clients that one process trains at once on a GPU, each with its own networks and CUDA
            stream. It takes the memory of as many clients. On an H200, small networks gained nothing; several
            `workers` are faster. The result does not depend on it. Flower's engines ignore it.
        threads: CPU threads of each worker. The last bits of the result depend on it.
        decoders: Number of processes that read and decode the images of a streamed split (``data.memory_gib``)
            ahead of the training, with one worker; 0 decodes between the steps. The result does not depend on
            it.
        channels_last: Use the channels-last memory layout for images and convolutions; ``"auto"``: on a GPU. The
            last bits of the result depend on it. It is never used on a GPU with ``stack``, where PyTorch has no
            BatchNorm for it, or in networks with a strided 1 × 1 convolution of fewer than 16 input channels, whose
            gradient oneDNN computes wrongly on a CPU.
        deterministic: On a GPU, use kernels that give the same bits each time, where PyTorch has them, and no fused
            attention. False may be faster; two equal runs may then differ in their last bits. A CPU's kernels
            always give the same bits.
        checkpoint_every: Rounds between checkpoints.
    """

    device: str = "auto"
    devices: tuple[str, ...] | Literal["auto"] = ()
    workers: Annotated[int, AtLeast(0), AtMost(1024)] | Literal["auto"] = "auto"
    stack: Annotated[int, Above(0), AtMost(1024)] = 1
    streams: Annotated[int, Above(0), AtMost(1024)] = 1
    threads: Annotated[int, Above(0), AtMost(1024)] = 1
    decoders: Annotated[int, AtLeast(0), AtMost(1024)] = 0
    channels_last: bool | Literal["auto"] = "auto"
    deterministic: bool = True
    checkpoint_every: Count = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_device(self.device, "engine.device")
        if self.devices != "auto":
            for name in self.devices:
                check_device(name, "engine.devices")
            if "auto" in self.devices:
                raise UserError('engine.devices lists devices; write engine.devices = "auto" for all GPUs')
        several = self.workers not in (1, "auto")
        if self.at_once > 1 and (several or self.decoders or self.devices):
            name = "engine.stack" if self.stack > 1 else "engine.streams"
            changes = [
                *(["engine.workers=1"] if several else []),
                *(["engine.decoders=0"] if self.decoders else []),
                *(["engine.devices=[]"] if self.devices else []),
            ]
            raise UserError(f"{name} trains clients together in one process; add {' '.join(changes)}")
        if self.devices and self.device != "auto":
            raise UserError(
                f"engine.devices takes the place of engine.device, which is {self.device!r}; add engine.device=auto"
            )

    @property
    def at_once(self) -> int:
        """Number of clients that one process trains at once."""
        return max(self.stack, self.streams)

    def uses_channels_last(self) -> bool:
        """Return whether networks and images use the channels-last layout, if the networks allow it.

        Raises:
            UserError: The recipe requires a GPU that is not there.
        """
        if self.channels_last != "auto" and self.stack == 1:
            return self.channels_last
        gpu = self.find_device().type == "cuda"
        if gpu and self.stack > 1:  # cuDNN's BatchNorm needs to know the layout, and `vmap` hides it
            return False
        return gpu if self.channels_last == "auto" else self.channels_last

    def on(self, device: str) -> EngineOptions:
        """These options with all computation on one device."""
        return replace(self, device=device, devices=())

    def of_a_node(self) -> EngineOptions:
        """These options at a Flower node, which computes on one device, of the kind that ``devices`` name."""
        if not self.devices:
            return self
        return self.on("auto" if self.devices == "auto" else torch.device(self.devices[0]).type)

    def find_devices(self) -> list[torch.device]:
        """Return the PyTorch devices to which the workers are assigned in turn.

        Raises:
            UserError: The recipe requires a GPU that is not there, or devices of several kinds.
        """
        return find_devices(self.devices, "engine.devices") if self.devices else [self.find_device()]

    def find_device(self) -> torch.device:
        """Return the PyTorch device of this process.

        Raises:
            UserError: The recipe requires a GPU that is not there, or devices of several kinds.
        """
        return self.find_devices()[0] if self.devices else find_device(self.device, "engine.device")

    def use_device(self) -> torch.device:
        """Return the PyTorch device of this process, after setting its choice of kernels (see `repeat_results`).

        Raises:
            UserError: The recipe requires a GPU that is not there, or devices of several kinds.
        """
        device = self.find_device()
        repeat_results(device, self.deterministic)
        return device

    def worker_devices(self, cohort: int, auto: int = 1) -> list[torch.device]:
        """Return the device of each worker process for a cohort of this size.

        Args:
            cohort: Number of clients in a round.
            auto: Number of processes where the recipe leaves it open.

        Raises:
            UserError: The recipe requires a GPU that is not there, or devices of several kinds.
        """
        devices = self.find_devices()
        wanted = auto if self.workers == "auto" else self.workers or max(1, num_cores() // self.threads)
        count = max(1, min(max(wanted, len(devices)), cohort))
        return [devices[worker % len(devices)] for worker in range(count)]
