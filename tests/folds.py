"""Folds of hand-made updates, for tests of aggregations."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch

from atoll.aggregation.update_geometry import Reference
from atoll.components.base import Aggregation, Setting
from atoll.components.training import TrainOptions
from atoll.core.tree import Weights
from atoll.models import ModelOptions


def setting(clients: int = 4, buffers: Collection[str] = (), **train: Any) -> Setting:
    """A setting made by hand."""
    return Setting(
        seed=0,
        num_clients=clients,
        image_shape=(1, 8, 8),
        num_classes=0,
        encoder_dim=2,
        embedding_dim=2,
        train=TrainOptions(**train),
        model=ModelOptions(),
        buffers=frozenset(buffers),
    )


def model(seed: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Weights:
    """A small model with a kernel, a bias, BatchNorm's statistics and its counter."""
    draw = torch.Generator().manual_seed(seed)
    shapes = {"conv.weight": (3, 2, 2, 2), "conv.bias": (3,), "bn.running_mean": (3,), "bn.running_var": (3,)}
    weights = {
        name: (scale * torch.randn(shape, generator=draw, dtype=torch.float64)).to(dtype)
        for name, shape in shapes.items()
    }
    return {**weights, "bn.num_batches_tracked": torch.tensor(10 + seed)}


BUFFERS = ("bn.running_mean", "bn.running_var", "bn.num_batches_tracked")


def fold(
    aggregation: Aggregation,
    current: Weights,
    updates: Iterable[Weights],
    round: int = 1,
    buffers: Collection[str] = (),
    scratch: Path | None = None,
    max_share: float = 1.0,
    **statistics: Iterable[float],
) -> Weights:
    """The next global model; ``statistics`` holds the numbers of all clients by name."""
    updates = list(updates)
    known = setting(len(updates), buffers, max_share=max_share)
    opened = aggregation.open({"global": current}, known, round, scratch)
    numbers = {name: list(values) for name, values in statistics.items()}
    for client, weights in enumerate(updates):
        retained = {name: values[client] for name, values in numbers.items()}
        update = {"weights": weights, "losses": {}, "parts": {}, **retained}
        opened.add(client, update, Reference(current).measure(weights))
        for tensor in weights.values():
            tensor.zero_()  # the networks go on to train the next client
    result: Weights = opened.close()["global"]
    return result


def copies(models: Iterable[Weights]) -> list[Weights]:
    """Models that a fold may overwrite."""
    return [{name: tensor.clone() for name, tensor in weights.items()} for weights in models]
