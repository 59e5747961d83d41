"""Workloads of ``atoll bench gpu``: one client's steps and rounds, on digits or on images of noise."""

from __future__ import annotations

import gc
import itertools
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path

import torch

from atoll.components.base import Batch, Trained
from atoll.components.training import make_optimizer
from atoll.core.config import describe
from atoll.core.devices import upload
from atoll.core.tree import Weights
from atoll.data.images import ImageSet, StoredPixels
from atoll.data.options import DataOptions
from atoll.data.sources import Splits, load_data
from atoll.engines.client import train_batch, train_client
from atoll.engines.client_states import ClientStates
from atoll.engines.executors import InProcess, in_this_process
from atoll.engines.federation import Federation
from atoll.engines.record import Record
from atoll.engines.server import Server
from atoll.functional import nt_xent
from atoll.recipe.recipe import Recipe, load_recipe, make_recipe

ROUND = 2  # because Orchestra does not train in the first round
PREPARED = 4  # number of batches that timed steps use in turn: more than fit in a cache
DIGITS = (
    "data.limit=512", "partition.kind=iid", "partition.clients=4", "train.batch_size=64", "train.lr=0.01",
    "train.epochs=1", "train.drop_last=true", "train.amp=false", "model.stem=cifar",
    "engine.workers=1", "engine.channels_last=false",
)  # fmt: skip
METHOD_NEEDS = {  # settings that a method requires on the digits
    **dict.fromkeys(
        ("fed_mae", "fed_mar", "dec_mar"), ("model.encoder=vit-tiny", "model.width=64", "model.depth=2")
    ),
    "fedca": ("options.fedca_alignment.data={source='digits'}",),
    "multi_krum": ("partition.clients=5",),
    "scaffold": ("train.momentum=0",),
}


@contextmanager
def full_float32(full: bool = True) -> Iterator[None]:
    """Compute matrix products and convolutions in full float32, or in TF32 if the device supports it."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = not full
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Workload:
    """A federation on a device, with its first client."""

    def __init__(self, recipe: Recipe, splits: Splits, device: torch.device) -> None:
        gc.collect()  # earlier workloads, which refer to themselves, would keep their part of the GPU's memory
        if device.type == "cuda":
            torch.cuda.empty_cache()
        recipe = replace(recipe, engine=recipe.engine.on(str(device)))
        self.federation = Federation(recipe, splits)
        self.device = self.federation.device
        self.method = self.federation.recipe.composed
        self.batch_size = recipe.train.batch_size
        images = (splits.test or splits.train).images
        start = self.federation.initial_weights()
        trained = {name: Trained(start, images) for name in self.method.prerequisites()}
        self.server = Server(self.federation.recipe, self.federation.setting, start, trained)
        self.server.checks.names = frozenset(self.federation.update_names())
        self.client = self.federation.client_side(self.server.constants)
        self.data = self.federation.client_data(0)
        setting = self.federation.setting
        cohort = range(setting.num_clients)
        self.message = self.method.send(self.server.state, setting, 0, cohort, ROUND)
        self._executor: InProcess | None = None

    def batches(self, epochs: int) -> Iterator[Batch]:
        """Iterate over the client's batches, which are made on demand."""
        return self.data.batches(ROUND, epochs, self.method.images)

    @property
    def in_a_pass(self) -> int:
        """Number of consecutive batches that are made together."""
        return self.data.batches_in_a_pass(self.method.images)

    def first_loss(self) -> float:
        """Compute the loss of the first batch."""
        self.client.start(self.message, None, self.data)
        return float(self.client.step(next(self.batches(1))).detach())

    def step(self) -> None:
        """Perform a step on one of the prepared batches."""
        batch = next(self._prepared)
        # A copy of the dict, because a method may add images.
        train_batch(self.client, Batch(batch.indices, dict(batch.images), batch.labels))

    def step_with_views(self) -> None:
        """Perform a step on the next batch, including its views."""
        train_batch(self.client, next(self._endless))

    def operations(self) -> int:
        """Count the floating-point operations of a step, computed without compiled code."""
        from torch.utils.flop_counter import FlopCounterMode

        # What PyTorch 2.11 meets in such a mode it never compiles afterwards; and a replayed graph counts nothing.
        with torch.compiler.set_stance("force_eager"), FlopCounterMode(display=False) as counter:
            self.step()
        # Another first step, which compiles, and after which a step is recorded.
        self.client.start(self.message, None, self.data)
        return int(counter.get_total_flops())

    def federated_round(self) -> Record:
        """Run a round of all clients: send, train, check and fold."""
        if self._executor is None:
            self._folder = tempfile.TemporaryDirectory()
            self._executor = in_this_process(self.federation, ClientStates(Path(self._folder.name)))
            self._executor.start(self.server.constants)
        return self.server.run_round(self._executor)

    @cached_property
    def _prepared(self) -> Iterator[Batch]:
        self.client.start(self.message, None, self.data)
        return itertools.cycle(list(itertools.islice(self.batches(1000), PREPARED)))

    @cached_property
    def _endless(self) -> Iterator[Batch]:
        self.client.start(self.message, None, self.data)
        return self.batches(1_000_000)


@cache
def _digits(data: DataOptions) -> Splits:
    return load_data(data, 0)


def digits_workload(settings: Sequence[str], device: torch.device) -> Workload:
    """Workload of a method on scikit-learn's digits, which need no folder of images."""
    recipe = load_recipe("digits", [*DIGITS, *settings])
    return Workload(recipe, _digits(recipe.data), device)


def synthetic_workload(
    recipe: str | Recipe,
    settings: Sequence[str],
    device: torch.device,
    clients: int = 1,
    batches: int = PREPARED,
) -> Workload:
    """Workload of a recipe on images of noise, with ``batches`` full batches at each client.

    The cost of a step does not depend on the content of the images.
    """
    base = load_recipe(recipe) if isinstance(recipe, str) else recipe
    alone = clients == 1
    partition = [
        f"partition={{kind='{'centralised' if alone else 'iid'}'{'' if alone else f', clients={clients}'}}}"
    ]
    made = make_recipe(
        {**describe(base), "partition": {}}, [*settings, *partition, "train.participation=1.0"]
    )
    n, data = clients * batches * made.train.batch_size, made.data
    draws = torch.Generator().manual_seed(0)
    shape = (n, data.channels, data.image_size, data.image_size)
    pixels = torch.randint(256, shape, generator=draws, dtype=torch.uint8)
    labels = torch.arange(n) % 10
    images = ImageSet(StoredPixels(pixels), labels, [str(name) for name in range(10)])
    return Workload(made, Splits(images, images), device)


def one_client_round(work: Workload) -> Weights:
    """Run the first client's round, and copy its weights."""
    update, _ = train_client(work.client, work.message, None, work.data)
    return {name: weight.detach().cpu().clone() for name, weight in update["weights"].items()}


def bare_round(work: Workload) -> None:
    """Train with the batches, views, networks, loss and optimiser of a SimCLR round, without federation."""
    federation, train = work.federation, work.federation.recipe.train
    networks = federation.networks.train()
    encoder, projector = networks["encoder"], networks["projector"]
    optimizer = make_optimizer(train, networks.parameters())
    draws = torch.Generator().manual_seed(0)
    pixels, kind = federation.placed_images.images, work.device.type
    total = torch.zeros((), device=work.device)
    for indices in federation.partition.clients:
        order = indices[torch.randperm(len(indices), generator=draws)]
        for rows in torch.split(order, train.batch_size):
            images = upload(pixels.gather(rows), work.device)
            views = federation.views.make(images, [draws, draws], federation.layout)
            with torch.autocast(kind, torch.bfloat16, enabled=train.amp and kind == "cuda"):
                loss = nt_xent(*(projector(encoder(view)) for view in views))
            optimizer.zero_grad(set_to_none=True)
            torch.autograd.backward(loss)
            optimizer.step()
            total += loss.detach()
    float(total)
