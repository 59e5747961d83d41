"""Momentum networks: copies of a client's networks that follow an exponential moving average."""

from __future__ import annotations

import torch
from torch import nn

from atoll.components.base import ClientContext
from atoll.core.tree import Weights


def start_target(context: ClientContext, name: str, retained: Weights | None) -> nn.ModuleDict:
    """Create a target network ξ for forward passes: the retained one, or a copy of the online network.

    The network is in train mode: BatchNorm uses batch statistics, as it does in the online network.

    Args:
        context: The client's context.
        name: Name of the network in `Forward`.
        retained: Weights from the client's last round; None for a copy of the online network.
    """
    return context.frozen(name, retained, train=True)


@torch.no_grad()
def follow(target: nn.Module, online: nn.Module, momentum: float) -> None:
    """Update the target's parameters: ξ ← m ξ + (1 − m) θ. Its BatchNorm has separate running statistics."""
    parameters = [parameter.detach() for parameter in target.parameters()]
    torch._foreach_lerp_(parameters, [p.detach() for p in online.parameters()], 1 - momentum)


def encoding_weights(context: ClientContext, networks: nn.ModuleDict, *heads: str) -> Weights:
    """Weights of the encoder, the projector and further heads, the networks of a target; without frozen ones."""
    state, chosen = networks.state_dict(), {"encoder", "projector", *heads}
    names = [name for name in state if name.partition(".")[0] in chosen and name not in context.fixed]
    return {name: state[name].detach() for name in names}


def enqueue(queue: torch.Tensor, *rows: torch.Tensor) -> torch.Tensor:
    """Append rows to a queue and drop as many of the oldest (first in, first out).

    Shape:
        queue: (M, d). rows: (N, d) each. Output: (M, d).
    """
    return torch.cat([queue, *(new.detach() for new in rows)])[-len(queue) :]
