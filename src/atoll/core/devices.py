"""The device that computes, and tensors on their way to it."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from atoll.core.errors import UserError


def check_device(name: str, option: str) -> None:
    """Check the name of a device; whether the device is there shows `find_device`.

    Args:
        name: ``"auto"``, ``"cpu"``, ``"cuda"``, ``"cuda:1"``…
        option: The option that holds the name, for the error message.

    Raises:
        UserError: The name is no such name.
    """
    if name != "auto":
        with contextlib.suppress(RuntimeError):
            if torch.device(name).type in ("cpu", "cuda"):
                return
        raise UserError(f"{option} is {name!r}; use auto, cpu or cuda")


def find_device(name: str, option: str) -> torch.device:
    """Return the device of a name; for ``"auto"`` a GPU if there is one.

    Raises:
        UserError: The name requires a GPU, and there is none.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"{option} is cuda, and PyTorch finds no GPU; use {option}=cpu")
    return device


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device, without waiting for a GPU to take it.

    A copy from ordinary memory would wait until the GPU has done all that was asked of it before; one from pinned
    memory queues up. Use it for whatever goes up within a step; a tensor that is there already stays as it is.
    """
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
