"""The memory layout of images and convolutions."""

from __future__ import annotations

import torch
from torch import nn

_BLOCK = 16  # channels that oneDNN's widest kernel (AVX-512) computes together


def memory_layout(networks: nn.Module, channels_last: bool) -> torch.memory_format:
    """Return the layout in which the networks train.

    On a CPU, oneDNN's weight gradient of a strided 1 × 1 convolution with few input channels (fewer than 8 with
    AVX2, fewer than 16 with AVX-512) writes outside its memory in the channels-last layout: the process crashes, or
    the gradient is wrong (oneDNN issue 6035). Networks with such a convolution keep PyTorch's default layout, on
    every device.

    Args:
        networks: The networks to train.
        channels_last: Whether channels-last is wanted.
    """
    if channels_last and not any(map(_overruns, networks.modules())):
        return torch.channels_last
    return torch.contiguous_format


def _overruns(module: nn.Module) -> bool:
    return (
        isinstance(module, nn.Conv2d)
        and module.kernel_size == (1, 1)
        and module.stride != (1, 1)
        and module.in_channels // module.groups < _BLOCK
    )
