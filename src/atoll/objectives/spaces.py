"""Where a loss or a head may stand: on the representation h, or on the embedding z."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from atoll.components.base import Features, Setting, init_seed, seeded

Space = Literal["h", "z"]


def read(space: Space, features: Features) -> Tensor:
    """The named output of some images."""
    return features.h if space == "h" else features.z


def linear_head(setting: Setting, name: str, space: Space, outputs: int) -> dict[str, nn.Module]:
    """A linear layer over a space, under its name.

    Its first weights depend on the run's seed and on the name alone, so that all objectives with a
    classifier begin with the same one.
    """
    width = setting.encoder_dim if space == "h" else setting.embedding_dim
    return {name: seeded(init_seed(setting.seed, name, setting.draw), lambda: nn.Linear(width, outputs))}


def classifying(space: Space, name: str) -> tuple[str, ...]:
    """The networks from images to the logits of a head over a space."""
    return ("encoder", name) if space == "h" else ("encoder", "projector", name)
