"""Noise in place of images and of prerequisite runs, for commands that measure sizes and times."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.components.base import Trained
from atoll.core.rng import stream
from atoll.data.images import StoredPixels
from atoll.engines.federation import Federation
from atoll.recipe.recipe import Recipe


def noise_pixels(recipe: Recipe, count: int) -> Tensor:
    """Images of noise in the recipe's format, (count, C, H, W), uint8."""
    size = recipe.data.image_size
    shape = (count, recipe.data.channels, size, size)
    return torch.randint(256, shape, generator=stream(0, "noise"), dtype=torch.uint8)


def stand_ins(federation: Federation, images: int) -> dict[str, Trained]:
    """Stand-ins for the results of prerequisite runs: the initial model, as if trained on ``images`` of noise."""
    recipe = federation.recipe
    return {
        name: Trained(federation.initial_weights(), StoredPixels(noise_pixels(recipe, images)))
        for name in recipe.composed.prerequisites()
    }
