"""Extent of ``atoll bench gpu``: in full, and a test of it at tiny size."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.methods.registry import METHODS
from atoll.papers.tables import table_names

# The tables that are measured first, the most important ones; the others follow by name.
FIRST_TABLES = ("fedquad-1", "fedquad-2", "ssd-1", "l-dawa-6")


@dataclass(frozen=True)
class Scale:
    """Extent of the measurement.

    Attributes:
        methods: Methods to check.
        matmul: Side of the matrices whose product gives the peak.
        view_batches: (images, side) of the augmentation's batches.
        steps: (encoder, batch, side) of the training steps.
        warm: Number of calls before the timing starts.
        timed: Largest number of calls in one timing; there are three timings.
        clients: Number of clients in the federated round that is compared with a bare loop.
        batches: Number of batches of each client.
        shared: Numbers of small clients that train on one GPU at once (see `gpu_sharing`).
        tables: Tables whose duration is projected.
        patience: Factor of the parts' time limits.
        digits: Settings of the recipe that methods are checked with.
        small: Settings of the small clients.
        settings: Settings of the tables' recipes.
    """

    methods: tuple[str, ...]
    matmul: int
    view_batches: tuple[tuple[int, int], ...]
    steps: tuple[tuple[str, int, int], ...]
    warm: int
    timed: int
    clients: int
    batches: int
    shared: tuple[int, ...]
    tables: tuple[str, ...]
    patience: float = 1.0
    digits: tuple[str, ...] = ()
    small: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()


SCALES = {
    "full": Scale(
        methods=tuple(sorted(METHODS)),
        matmul=8192,
        view_batches=((512, 32), (128, 32), (128, 224)),
        steps=(("resnet18", 512, 32), ("resnet18", 128, 32), ("vit-s", 256, 224)),
        warm=3,
        timed=20,
        clients=4,
        batches=25,
        shared=(10, 5),
        tables=(*FIRST_TABLES, *(name for name in table_names() if name not in FIRST_TABLES)),
    ),
    "test": Scale(
        methods=("fed_simclr", "ssd"),
        matmul=64,
        view_batches=((8, 32),),
        steps=(("resnet-narrow", 4, 16), ("vit-narrow", 2, 32)),
        warm=1,
        timed=1,
        clients=2,
        batches=2,
        shared=(2,),
        tables=("fedquad-1",),
        patience=100,
        digits=("data.limit=64", "train.batch_size=8", "model.width=4", "model.projector_hidden=[16]"),
        small=("data.limit=64", "train.epochs=1"),
        settings=("train.batch_size=4",),
    ),
}
