"""Buffers that are in no state dict (``persistent=False``), so that nothing loads or sends them."""

from __future__ import annotations

import torch
from torch import nn

from atoll.core.tree import Weights


def unsaved_buffers(networks: nn.Module) -> Weights:
    """The buffers of modules that are in no state dict, by name."""
    return {
        f"{prefix}.{name}": buffer
        for prefix, module in networks.named_modules()
        for name in sorted(module._non_persistent_buffers_set)
        if (buffer := module._buffers.get(name)) is not None
    }


@torch.no_grad()
def set_unsaved(networks: nn.Module, values: Weights) -> None:
    """Set the buffers that are in no state dict; one of another shape by now is a cache, and is left alone."""
    for name, buffer in unsaved_buffers(networks).items():
        value = values.get(name)
        if value is not None and value.shape == buffer.shape:
            buffer.copy_(value)
