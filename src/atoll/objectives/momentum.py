"""Momentum networks: gradient-free copies of a client's networks that follow them slowly."""

from __future__ import annotations

import torch
from torch import nn

from atoll.components.base import ClientContext
from atoll.core.tree import Weights


def start_target(context: ClientContext, name: str, kept: Weights | None) -> nn.ModuleDict:
    """A target network ξ that passes can name: the kept one, or a copy of the online network.

    It stays in train mode: BatchNorm normalises by the batch, as it does in the online network.
    """
    return context.frozen(name, kept, train=True)


@torch.no_grad()
def follow(target: nn.Module, online: nn.Module, momentum: float) -> None:
    """ξ ← m ξ + (1 − m) θ over the parameters; the target's BatchNorm keeps statistics of its own."""
    parameters = [parameter.detach() for parameter in target.parameters()]
    torch._foreach_lerp_(parameters, [p.detach() for p in online.parameters()], 1 - momentum)


def encoding_weights(networks: nn.ModuleDict) -> Weights:
    """The weights of encoder and projector, which are all that a target needs."""
    state = networks.state_dict()
    return {name: state[name].detach() for name in state if name.startswith(("encoder.", "projector."))}


def enqueue(queue: torch.Tensor, *rows: torch.Tensor) -> torch.Tensor:
    """First in, first out: the newest rows at the end, as many as before."""
    return torch.cat([queue, *(new.detach() for new in rows)])[-len(queue) :]
