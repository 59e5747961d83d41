"""The setting of a run, which server and clients know before it starts, and the seeds of the initial weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from atoll.components.training import TrainOptions
from atoll.core.errors import OldCodeWarning, warn
from atoll.core.process_state import seeded_streams
from atoll.core.rng import derive_seed
from atoll.core.tree import Weights
from atoll.models import ModelOptions

T = TypeVar("T")


@dataclass(frozen=True)
class Setting:
    """The facts about a run that server and clients derive from its recipe.

    Attributes:
        seed: The run's seed.
        num_clients: K, the number of clients.
        image_shape: (C, H, W) of a view.
        num_classes: Number of classes of the labels; 0 without labels.
        encoder_dim: Size of a representation h.
        embedding_dim: Size of an embedding z.
        train: The recipe's ``[train]`` section.
        model: The recipe's ``[model]`` section, for components that build heads.
        cohort_size: Number of clients in a round, the smallest if rounds differ; 0 in a setting that was
            constructed by hand.
        sizes: Number of samples of each client, if the server may know it.
        buffers: Names of the weights that no gradient trains, such as BatchNorm's running statistics.
        running_statistics: Names of the buffers that are BatchNorm's running statistics. They follow the data's
            scale.
        local_only: Names of the weights that never leave a client.
        base_names: Names of the weights that each client receives once, with their initial values: frozen weights,
            and those that each client trains for itself (``method.share``, `Merge.local_heads`).
        personal: Whether clients retain weights, so that each ends with a personal model.
        draw: Index of the independent initial model that is being built; 0 is the model that all clients share.
        checkpoint_every: Rounds between checkpoints. If the run is killed, the rounds since the last checkpoint run
            again.
        further_models: Function that draws further initial models, independent of the shared one, by index from 1.
            None in a setting that was constructed by hand, without networks.
    """

    seed: int
    num_clients: int
    image_shape: tuple[int, int, int]
    num_classes: int
    encoder_dim: int
    embedding_dim: int
    train: TrainOptions
    model: ModelOptions
    cohort_size: int = 0
    sizes: tuple[int, ...] = ()
    buffers: frozenset[str] = frozenset()
    running_statistics: frozenset[str] = frozenset()
    local_only: frozenset[str] = frozenset()
    base_names: frozenset[str] = frozenset()
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
        warn(message, OldCodeWarning)
        return value


def seeded(module_seed: int, build: Callable[[], T]) -> T:
    """Build a module from separate random streams; the global streams are unchanged."""
    with seeded_streams(module_seed):
        torch.manual_seed(module_seed)  # also seeds a GPU, which the user's module may be the first to use
        return build()


def init_seed(seed: int, name: str, draw: int = 0) -> int:
    """Derive the seed of a network's initial weights; it does not depend on which other heads exist.

    ``draw`` is the index of the independent initialisation; 0 is the one that all clients share.
    """
    return derive_seed(seed, "init", name, *([draw] if draw else []))
