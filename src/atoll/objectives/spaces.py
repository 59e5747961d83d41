"""Input of a loss or a head: the representation h or the embedding z."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from atoll.components.base import Features, Setting, init_seed, seeded

Space = Literal["h", "z"]


def read(space: Space, features: Features) -> Tensor:
    """Select the representation h or the embedding z from the outputs of a forward pass."""
    return features.h if space == "h" else features.z


def linear_head(setting: Setting, name: str, space: Space, outputs: int) -> dict[str, nn.Module]:
    """Build a linear layer on h or z.

    Its initial weights depend only on the run's seed and on the name, so all objectives with a classifier start
    with the same one.

    Args:
        setting: The run's setting.
        name: Name of the layer.
        space: The layer's input.
        outputs: Width of the layer's output.

    Returns:
        The layer under its name.
    """
    width = setting.encoder_dim if space == "h" else setting.embedding_dim
    return {name: seeded(init_seed(setting.seed, name, setting.draw), lambda: nn.Linear(width, outputs))}


def classifying(space: Space, name: str) -> tuple[str, ...]:
    """Names of the networks from images to the logits of a head on h or z."""
    return ("encoder", name) if space == "h" else ("encoder", "projector", name)
