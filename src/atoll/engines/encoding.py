"""How encoders compute while a client trains: as they are, with checkpointed gradients, or by compiled code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn

from atoll.components.training import TrainOptions
from atoll.models.compiled import compiled
from atoll.models.gradient_checkpointing import checkpointed


@contextmanager
def encoding(networks: Mapping[str, nn.ModuleDict], train: TrainOptions) -> Iterator[None]:
    """Within the context, encoders compute as the recipe says.

    Args:
        networks: A client's networks by name; of their copies, none needs gradients.
        train: The recipe's options.
    """
    encoders = [network["encoder"] for network in networks.values()] if train.compile else []
    with (
        checkpointed(networks["local"]["encoder"], train.checkpoint_gradients),
        compiled(encoders, max(1, train.batch_size // train.accumulate)),
    ):
        yield
