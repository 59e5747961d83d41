"""Egress: every tensor that a client sends, receives and retains, listed before any real image is read.

The list is measured: the recipe's method runs some rounds on noise with the recipe's networks, and all messages,
updates and client states are listed. The components' declarations bound the measured sizes, and add the entries
that do not occur in the first rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from atoll.commands.noise import noise_pixels, stand_ins
from atoll.components.base import ChoiceSpec, TensorSpec
from atoll.components.declaration import Leaf, declared_leaves
from atoll.core.errors import UserError
from atoll.core.threads import threads
from atoll.core.tree import Tree, clone, num_bytes
from atoll.data.images import ImageSet, StoredPixels
from atoll.data.partition.partition import Partition
from atoll.data.sources import Splits
from atoll.engines.client_states import ClientStates
from atoll.engines.executors import InProcess
from atoll.engines.federation import Federation
from atoll.engines.jobs import Job, Result
from atoll.engines.server import Server
from atoll.engines.update_checks import update_spec
from atoll.methods.method import Method
from atoll.recipe.recipe import Recipe, recipe_digest

CLASSES = 10  # of the noise, if a method reads labels
ROUNDS = 2
CLIENTS = 5  # enough for aggregation rules that need several clients, such as multi-Krum
OTHERS = 4  # images at each client except the second
PROBES = 64, 96  # two numbers of images at the client: a size that grows between them depends on the images


@dataclass(frozen=True)
class Item:
    """A tensor or a number.

    Attributes:
        name: Path in the tree, with dots.
        shape: Shape of the tensor; None for a number or a string. Sizes that depend on the number of images are
            those for all images.
        dtype: Type of the tensor's values.
        bytes: Size in a message.
        why: Purpose.
        rounds: The first rounds in which it occurred; empty if it occurs only in later ones.
    """

    name: str
    shape: tuple[int, ...] | None
    dtype: str
    bytes: int
    why: str
    rounds: tuple[int, ...]


@dataclass(frozen=True)
class Egress:
    """A client's traffic.

    Attributes:
        up: What it sends in a round.
        down: What it receives in a round.
        once: What it receives once.
        kept: What it retains and does not send.
        images: The number of training images that the sizes are for.
        recipe: SHA-256 of the complete recipe, by which a site's policy allows it.
    """

    up: list[Item]
    down: list[Item]
    once: list[Item]
    kept: list[Item]
    images: int
    recipe: str


def egress(recipe: Recipe, images: int = 1000) -> Egress:
    """Measure what a client with ``images`` training images sends, receives and retains.

    Sizes that grow with the number of images are extrapolated linearly from two small numbers of images.

    Raises:
        UserError: ``images`` is below 1, or the recipe's method does not fit its networks.
    """
    if images < 1:
        raise UserError(f"--images is {images}; it must be the number of images at the site, at least 1")
    (few, declared), (more, declared_more) = (_run_rounds(recipe, count) for count in PROBES)
    method = recipe.composed

    def items(place: str) -> list[Item]:
        small, large = _rounds(few[place]), _rounds(more[place])
        # No bounds for sizes that grow with the images: the declared ones are for the two small numbers of images.
        bounds = {name: spec for name, spec in declared.items() if spec == declared_more[name]}
        specs = bounds if place == "up" else {}
        measured = [
            _item(name, value, large[name][0], rounds, images, _why(method, place, name), specs.get(name))
            for name, (value, rounds) in small.items()
        ]
        return measured + [
            _declared_item(name, spec, _why(method, place, name))
            for name, spec in specs.items()
            if name not in small
        ]

    return Egress(
        items("up"), items("down"), items("once"), items("kept"), images, recipe_digest(recipe.to_toml())
    )


_Flat = dict[str, Any]


def _run_rounds(recipe: Recipe, count: int) -> tuple[dict[str, list[_Flat]], dict[str, Leaf]]:
    """Run some rounds on noise.

    Returns:
        What the second client sent, received and retained in each round, flattened (the second, because the first
        may receive more at the start); and what components declare to send, by the same names.
    """
    train = replace(
        recipe.train,
        rounds=ROUNDS,
        epochs=min(recipe.train.epochs, 1),
        batch_size=min(recipe.train.batch_size, 32),
        participation=1.0,
        start=None,
        lr=1e-6,
        first_norm=1e9,
        norm_factor=1e9,
    )
    recipe = replace(recipe, train=train, engine=recipe.engine.on("cpu"))
    federation = Federation(recipe, *_noise(recipe, count))
    prerequisites = stand_ins(federation, count)
    found: dict[str, list[_Flat]] = {"up": [], "down": [], "once": [], "kept": []}
    with TemporaryDirectory() as folder, threads(recipe.engine.threads):
        states = ClientStates(Path(folder) / "clients")
        server = Server(
            recipe, federation.setting, federation.initial_weights(), prerequisites, Path(folder) / "scratch"
        )
        executor = _Recorder(InProcess(federation, states), found)
        executor.start(server.constants)
        for _ in range(ROUNDS):
            server.run_round(executor)
            if recipe.stateful:
                found["kept"].append(_flat(states.load(1, server.round)))
    return found, _declared(federation)


def _declared(federation: Federation) -> dict[str, Leaf]:
    slices = update_spec(federation.recipe.composed, federation.setting)["parts"]
    return dict(declared_leaves(slices, federation.sent_weights(), "parts"))


class _Recorder:
    """Executor that records what the server and the second client send to each other."""

    def __init__(self, executor: InProcess, found: dict[str, list[_Flat]]) -> None:
        self._executor = executor
        self._found = found

    def start(self, constants: Tree) -> None:
        self._found["once"].append(_flat(constants))
        self._executor.start(constants)

    def run(
        self, jobs: Sequence[Job], progress: Callable[[int], None] | None
    ) -> Generator[Result, None, None]:
        for job, result in zip(jobs, self._executor.run(jobs, progress), strict=True):
            self._record(job, result.update)
            yield result

    def _record(self, job: Job, update: Tree) -> None:
        if job.client == 1:
            self._found["down"].append(_flat(job.message))
            self._found["up"].append(_flat(clone(update)))


def _noise(recipe: Recipe, count: int) -> tuple[Splits, Partition]:
    sizes = [OTHERS, count, *([OTHERS] * (CLIENTS - 2))]
    labels = torch.arange(sum(sizes)) % CLASSES if recipe.composed.needs_labels else None
    classes = [str(k) for k in range(CLASSES)] if recipe.composed.needs_labels else []
    images = ImageSet(StoredPixels(noise_pixels(recipe, sum(sizes))), labels, classes)
    names = [str(k) for k in range(CLIENTS)]
    return Splits(images), Partition.consecutive(sizes, names, recipe.partition, recipe.seed, classes=classes)


def _flat(tree: Tree, prefix: str = "") -> _Flat:
    if isinstance(tree, Mapping):
        pairs = [(str(key), value) for key, value in tree.items()]
    elif isinstance(tree, list | tuple) and any(isinstance(value, Tensor | Mapping | list) for value in tree):
        pairs = [(str(key), value) for key, value in enumerate(tree)]
    else:
        return {} if tree is None else {prefix.removesuffix("."): tree}
    return {name: leaf for key, value in pairs for name, leaf in _flat(value, f"{prefix}{key}.").items()}


def _rounds(flats: list[_Flat]) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """The last value of each leaf in any round, with the rounds in which it occurs."""
    names = dict.fromkeys(name for flat in flats for name in flat)
    return {
        name: (
            next(flat[name] for flat in reversed(flats) if name in flat),
            tuple(k for k, flat in enumerate(flats, 1) if name in flat),
        )
        for name in names
    }


def _item(
    name: str,
    small: Any,
    large: Any,
    rounds: tuple[int, ...],
    images: int,
    why: str,
    spec: Leaf | None,
) -> Item:
    if not isinstance(small, Tensor):
        size = num_bytes(small) if spec is None else spec.num_bytes
        return Item(name, None, type(small).__name__, size, why, rounds)
    shape = tuple(small.shape)
    if isinstance(large, Tensor) and large.dim() == small.dim():
        slopes = [(b - a) / (PROBES[1] - PROBES[0]) for a, b in zip(small.shape, large.shape, strict=True)]
        shape = tuple(round(a + slope * (images - PROBES[0])) for a, slope in zip(shape, slopes, strict=True))
    if isinstance(spec, TensorSpec):
        # Extrapolation has no upper bound, such as the size of FedCA's dictionary.
        shape = tuple(map(min, shape, spec.largest))
    return _tensor_item(name, shape, small.dtype, why, rounds)


def _declared_item(name: str, spec: Leaf, why: str) -> Item:
    if isinstance(spec, TensorSpec):
        return _tensor_item(name, spec.largest, spec.dtype, why, ())
    kind = "str" if isinstance(spec, ChoiceSpec) else spec.kind.__name__
    return Item(name, None, kind, spec.num_bytes, why, ())


def _tensor_item(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, why: str, rounds: tuple[int, ...]
) -> Item:
    return Item(name, shape, str(dtype).removeprefix("torch."), prod(shape) * dtype.itemsize, why, rounds)


def _why(method: Method, place: str, name: str) -> str:
    """Purpose of an entry, as its component describes it."""
    first, *rest = name.split(".")
    if place == "up" and method.aggregation.masking:
        return "over Flower, only within the masked sum (32 bits a weight)"
    if first in ("parts", *(component.name for component in method.components)):
        owner = rest[0] if first == "parts" else first
        component = next((component for component in method.components if component.name == owner), None)
        if component is None:
            return f"for {owner}"
        words = {"up": component.egress, "kept": component.keeps}.get(place, ())
        source = f" ({component.source})" if component.source else ""
        return "; ".join(words) or f"for {owner}{source}"
    return _REASONS.get((place, first)) or _REASONS.get(("", first)) or "for the fold"


_REASONS = {
    ("up", "weights"): "the trained weights, which the server folds",
    ("down", "models"): "the start of the training",
    ("", "base"): "a weight of which the server sends the initial value alone",
    ("kept", "personal"): "a weight that the client trains for itself",
    ("", "losses"): "the mean of each loss over the round, for the log",
    ("", "samples"): "the number of training images: the weight in the fold",
    ("", "batches"): "the number of batches: the weight in the fold",
    ("", "loss"): "the mean loss of the last epoch: the weight in the fold",
    ("", "round"): "which round this is",
    ("", "client"): "which client this is",
    ("", "epochs"): "how long to train",
    ("", "kept"): "which client state is valid",
    ("", "buffers"): "BatchNorm's running statistics, which do not leave",
    ("", "optimizer"): "the optimiser's state, which does not leave",
}
