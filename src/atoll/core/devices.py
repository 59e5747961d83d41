"""Tensors on their way to the device that trains."""

from __future__ import annotations

import torch
from torch import Tensor


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device, without waiting for a GPU to take it.

    A copy from ordinary memory would wait until the GPU has done all that was asked of it before; one from pinned
    memory queues up. Use it for whatever goes up within a step; a tensor that is there already stays as it is.
    """
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
