"""What every encoder is: a module from images to representations that knows how to be rebuilt."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from atoll.core.errors import UserError


class Encoder(nn.Module):
    """Maps images to representations h.

    Attributes:
        dim: Width of a representation.
        spec: What `build_encoder` was given, as JSON values: enough to build the same architecture again.
        metadata: What was saved beside the weights, such as the inputs' normalisation.

    Shape:
        - Input: (N, channels, image_size, image_size)
        - Output: (N, dim)
    """

    dim: int
    spec: dict[str, Any]
    metadata: dict[str, Any]

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.spec = {}
        self.metadata = {}

    def forward(self, images: Tensor) -> Tensor:
        """Representations of a batch of images; each kind of encoder says how."""
        raise NotImplementedError


def graft(module: nn.Module, state: dict[str, Tensor], source: str) -> str:
    """Copies into ``module`` the tensors of ``state`` that fit by name and shape; says what it left out.

    Args:
        module: The module to warm up, in place.
        state: Named tensors, such as a torchvision state dict.
        source: How to call ``state`` in the sentence.

    Returns:
        One sentence: how many of the module's tensors were found, which were not, and what was left unused.

    Raises:
        UserError: Not one trained tensor matches.
    """
    own = module.state_dict()
    fitting = {name for name in own.keys() & state.keys() if own[name].shape == state[name].shape}
    if fitting.isdisjoint(name for name, _ in module.named_parameters()):  # BatchNorm's counters fit anything
        raise UserError(
            f"{source} holds no trained tensor that fits this encoder by name and shape "
            f"(it has {_some(state)}; the encoder has {_some(own)}); give weights of the same architecture."
        )
    with torch.no_grad():
        for name in fitting:
            own[name].copy_(state[name])
    sentence = f"{len(fitting)} of the encoder's {len(own)} tensors came from {source}"
    if kept := own.keys() - fitting:
        sentence += f"; missing there or of another shape, so kept as they were: {_some(kept)}"
    if unused := state.keys() - own.keys():
        sentence += f"; there but not used: {_some(unused)}"
    return sentence + "."


def _some(names: Any, limit: int = 4) -> str:
    names = sorted(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
