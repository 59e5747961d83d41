"""PyTorch's optimisers, without importing its compiler, which takes most of a second in each process."""

from __future__ import annotations

import inspect

import torch


def _without_compiler(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Give an optimiser unwrapped methods, which PyTorch wraps for ``torch.compile``; its steps are the same."""
    for name in ("zero_grad", "add_param_group", "state_dict", "load_state_dict"):
        setattr(kind, name, inspect.unwrap(getattr(kind, name)))
    kind.step = torch.no_grad()(inspect.unwrap(kind.step))  # type: ignore[method-assign]
    return kind


@_without_compiler
class SGD(torch.optim.SGD):
    """See `torch.optim.SGD`."""


@_without_compiler
class Adam(torch.optim.Adam):
    """See `torch.optim.Adam`."""


@_without_compiler
class AdamW(torch.optim.AdamW):
    """See `torch.optim.AdamW`."""
