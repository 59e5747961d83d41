"""What server and clients know of a run before it begins, and the seeds of its networks' first weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from atoll.components.training import TrainOptions
from atoll.core.rng import derive_seed
from atoll.core.tree import Weights
from atoll.models import ModelOptions

T = TypeVar("T")


@dataclass(frozen=True)
class Setting:
    """What server and clients know of a run from its recipe.

    Attributes:
        seed: the run's seed.
        num_clients: K.
        image_shape: (C, H, W) of a view.
        num_classes: of the labels; 0 where there are none.
        encoder_dim: size of a representation h.
        embedding_dim: size of an embedding z.
        train: how clients train.
        model: the recipe's model section, for components that build heads of their own.
        sizes: samples at each client, where the server may know them.
        buffers: names of the weights that no gradient trains, such as BatchNorm's running statistics.
        running_statistics: names of those of them that are BatchNorm's. They follow the data's scale.
        local_only: names of the weights that never leave a client.
        personal: whether clients keep weights of their own, so that each ends with a model of its own.
        draw: which of the independent initial models is being built; 0 is the one that all share.
        checkpoint_every: rounds between checkpoints, which a kill may have run again.
        further_models: draws further initial models, independent of the one that all share: the first, the
            second, … It is there wherever networks can be built, and None in a setting that was made by hand.
    """

    seed: int
    num_clients: int
    image_shape: tuple[int, int, int]
    num_classes: int
    encoder_dim: int
    embedding_dim: int
    train: TrainOptions
    model: ModelOptions
    sizes: tuple[int, ...] = ()
    buffers: frozenset[str] = frozenset()
    running_statistics: frozenset[str] = frozenset()
    local_only: frozenset[str] = frozenset()
    personal: bool = False
    draw: int = 0
    checkpoint_every: int = 1
    further_models: Callable[[int], Weights] | None = None

    @property
    def fresh(self) -> Callable[[int], Weights] | None:
        """Deprecated: `further_models`."""
        return self._renamed("fresh", "further_models", self.further_models)

    @property
    def stays(self) -> frozenset[str]:
        """Deprecated: `local_only`."""
        return self._renamed("stays", "local_only", self.local_only)

    @staticmethod
    def _renamed(old: str, new: str, value: T) -> T:
        message = f"Setting.{old} is now Setting.{new}; the old name will be removed in 0.3"
        warnings.warn(message, DeprecationWarning, stacklevel=3)
        return value


def seeded(module_seed: int, build: Callable[[], T]) -> T:
    """Build a module with its own random stream, leaving the global one as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(module_seed)
        return build()


def init_seed(seed: int, name: str, draw: int = 0) -> int:
    """The seed of a network's first weights: a head more or less does not change the others'.

    ``draw`` counts independent initialisations; 0 is the one that all share.
    """
    return derive_seed(seed, "init", name, *([draw] if draw else []))
