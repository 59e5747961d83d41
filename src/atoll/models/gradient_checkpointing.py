"""Gradient checkpointing: the backward pass computes an encoder's blocks again instead of keeping their results.

Reference:
    Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016, https://arxiv.org/abs/1604.06174.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from atoll.models.norms import norm_layers


@contextmanager
def checkpointed(encoder: nn.Module, enabled: bool = True) -> Iterator[None]:
    """Within the context, keep only the inputs of an encoder's blocks for the backward pass.

    Outputs, gradients, random draws and BatchNorm's statistics do not change.

    Args:
        encoder: An encoder.
        enabled: Whether to do anything.

    Example:
        >>> import torch
        >>> from atoll.models import ModelOptions, build_encoder
        >>> from atoll.models.gradient_checkpointing import checkpointed
        >>> encoder = build_encoder(ModelOptions(encoder="resnet-narrow"), channels=1, image_size=8)
        >>> with checkpointed(encoder):
        ...     encoder(torch.ones(2, 1, 8, 8)).sum().backward()
        >>> encoder.conv1.weight.grad is not None
        True
    """
    chosen = (_blocks(encoder) or [encoder]) if enabled else []
    before = [vars(block).get("forward") for block in chosen]  # a library may have replaced it
    for block in chosen:
        setattr(block, "forward", partial(_run, block.forward, block))  # noqa: B010  (mypy: a method)
    try:
        yield
    finally:
        for block, forward in zip(chosen, before, strict=True):
            del block.forward
            if forward is not None:
                setattr(block, "forward", forward)  # noqa: B010  (mypy: a method)


def _blocks(module: nn.Module) -> list[nn.Module]:
    """The blocks that a network repeats: the innermost composite modules that are in a sequence or list."""
    found: list[nn.Module] = []
    for child in module.children():
        inner = _blocks(child)
        sequence = isinstance(module, nn.Sequential | nn.ModuleList)
        found += inner or ([child] if sequence and any(True for _ in child.children()) else [])
    return found


def _run(forward: Callable[..., Any], block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    norms = [norm for norm in norm_layers(block).values() if norm.training]
    return checkpoint(
        forward, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), _resting(norms)), **kwargs
    )


@contextmanager
def _resting(norms: Sequence[_BatchNorm]) -> Iterator[None]:
    """Keep BatchNorm's running statistics unchanged, because the first computation has already updated them."""
    before = [dict(norm.named_buffers(recurse=False)) for norm in norms]
    for norm, buffers in zip(norms, before, strict=True):
        for name, buffer in buffers.items():
            setattr(norm, name, buffer.clone())
    try:
        yield
    finally:
        for norm, buffers in zip(norms, before, strict=True):
            for name, buffer in buffers.items():
                setattr(norm, name, buffer)
