"""Construction of a partition of the training images among clients.

`make_partition` splits the indices 0..N-1 of a training set. Every kind assigns each index to at most one client,
leaves no client empty (unless small clients may sit out), and is deterministic in (options, labels, seed). The
arithmetic of the kinds is in `iid_skew_shards` and `dirichlet`.

Indices are sorted within a client, except if a published split has another order: see `dirichlet.VARIANTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from atoll.core.errors import UserError, did_you_mean, warn
from atoll.core.rng import numpy_stream
from atoll.core.text import plural
from atoll.data.images import ImageSet
from atoll.data.options import PartitionOptions
from atoll.data.partition.dirichlet import VARIANTS, dirichlet_counts, split_dirichlet
from atoll.data.partition.iid_skew_shards import (
    Indices,
    largest_remainder,
    split_evenly,
    split_shards,
    split_skewed,
)
from atoll.data.partition.partition import Partition, join_shares
from atoll.data.partition.small_clients import sit_out_words


def make_partition(
    options: PartitionOptions,
    labels: Tensor | None,
    columns: Mapping[str, Tensor],
    num_samples: int,
    seed: int,
    *,
    clusters: Tensor | None = None,
    classes: Sequence[str] = (),
    column_values: Mapping[str, Sequence[str]] | None = None,
    unread: Sequence[str] = (),
    fingerprint: str = "",
) -> Partition:
    """Split `num_samples` training images among clients.

    Args:
        options: The kind of partition and its parameters.
        labels: Class of each image; None without labels.
        columns: Further integer columns, such as PACS's ``domain``.
        num_samples: Number of training images N.
        seed: The run's seed.
        clusters: Cluster of each image; the option ``features`` requires them, and then they are split instead of
            the labels.
        classes: Class names; they determine the number of classes if the last classes have no image.
        column_values: Names of the columns' values, for the names of natural clients.
        unread: Names of columns that may hold natural clients and are not among `columns`.
        fingerprint: Fingerprint of the training set, for the record.

    Shape:
        - labels: (N,) int64; every column: (N,) int64; clusters: (N,) int64

    Raises:
        UserError: The partition does not exist for these images, or no draw gave every client enough images.
        ValueError: Labels or columns are not of length N.

    Reference:
        The kinds follow MOON (Li et al., CVPR 2021), FedU² (Liao et al., CVPR 2024), Dec-SSL (Wang et al.,
        ICLR 2023), L-DAWA (Rehman et al., ICCV 2023), Orchestra (Lubana et al., ICML 2022), FedCA and EasyFL;
        ``"quantity"`` follows NIID-Bench (Li et al., ICDE 2022).

    Example:
        >>> import torch
        >>> from atoll.data.options import PartitionOptions
        >>> from atoll.data.partition.make import make_partition
        >>> labels = torch.tensor([0, 1]).repeat(50)
        >>> partition = make_partition(PartitionOptions(kind="single-class", clients=2), labels, {}, 100, seed=0)
        >>> partition.counts
        tensor([[50,  0],
                [ 0, 50]])
    """
    known = {"labels": labels, "clusters": clusters, **columns}
    for name, values in known.items():
        if values is not None and values.shape != (num_samples,):
            raise ValueError(f"{name} must have shape ({num_samples},), not {tuple(values.shape)}")
    if num_samples == 0:
        raise UserError("there are no training images to split among clients")
    if options.features and clusters is None and options.kind != "centralised":
        raise ValueError("partition.features needs the cluster of each image")
    task = _Task(options, labels, columns, column_values or {}, unread, clusters, num_samples, seed)
    if options.kind not in ("natural", "centralised"):
        task.check_size(options.clients)
    names, shares = _KINDS[options.kind](task)
    if options.sit_out_below is None or options.min_size is not None:
        _refuse_small(names, shares, options)
    clients = join_shares(shares)
    return Partition(
        clients=clients,
        names=names,
        counts=None if labels is None else _count(labels, clients, len(classes)),
        options=options,
        seed=seed,
        num_samples=num_samples,
        fingerprint=fingerprint,
        classes=tuple(classes),
        cluster_counts=None if clusters is None else _count(clusters, clients, 0),
    )


def _refuse_small(names: Sequence[str], shares: Sequence[Indices], options: PartitionOptions) -> None:
    sit_out = "let such clients sit out: partition.sit_out_below = 2"
    remedy = sit_out if options.min_size is None else "lower partition.min_size"
    if options.kind != "natural":
        remedy = f"use fewer clients or more images, or {remedy}"
    for name, share in zip(names, shares, strict=True):
        if len(share) < options.smallest_client:
            raise UserError(
                f"the {options.kind} partition leaves client {name!r} with {len(share)} training images, "
                f"fewer than {options.smallest_client}; {remedy}"
            )


def partition_images(
    images: ImageSet, options: PartitionOptions, seed: int, clusters: Tensor | None = None
) -> Partition:
    """Apply `make_partition` to an image set, with its names and fingerprint in the record.

    Clients below ``sit_out_below`` sit out, with a warning.
    """
    partition = make_partition(
        options,
        images.labels,
        images.columns,
        len(images),
        seed,
        clusters=clusters,
        classes=images.classes,
        column_values=images.column_values,
        unread=images.unread,
        fingerprint=images.fingerprint,
    )
    if options.sit_out_below is None:
        return partition
    partition = partition.without_small(options.sit_out_below)
    if partition.sit_out:
        warn(sit_out_words(partition.sit_out))
    return partition


def _count(labels: Tensor, clients: Sequence[Tensor], num_classes: int) -> Tensor:
    num_classes = max(num_classes, int(labels.max()) + 1)
    sizes = torch.tensor([len(indices) for indices in clients])
    owners = torch.repeat_interleave(torch.arange(len(clients)), sizes)
    cells = owners * num_classes + labels[torch.cat(list(clients))]
    return torch.bincount(cells, minlength=len(clients) * num_classes).view(len(clients), num_classes)


@dataclass(frozen=True)
class _Task:
    """Input of a kind of partition."""

    options: PartitionOptions
    labels: Tensor | None
    columns: Mapping[str, Tensor]
    column_values: Mapping[str, Sequence[str]]
    unread: Sequence[str]
    clusters: Tensor | None
    num_samples: int
    seed: int

    def rng(self, attempt: int = 0) -> np.random.Generator:
        return numpy_stream(self.seed, "partition", attempt)

    def check_size(self, clients: int) -> None:
        needed = self.options.smallest_client * clients
        if needed > self.num_samples:
            each = (
                f" of at least {self.options.smallest_client} images"
                if self.options.smallest_client > 1
                else ""
            )
            raise UserError(
                f"{clients} clients{each} need {needed} training images, but there are {self.num_samples}; "
                "set partition.clients lower or load more images"
            )

    def column(self, name: str) -> Tensor:
        if name not in self.columns:
            has = did_you_mean(name, self.columns) if self.columns else "none was read except labels"
            raise UserError(
                f"partition.column = {name!r} is not a column that was read; {has}; texts are read of Parquet, "
                f"CSV, the hub and tar with data.natural_column = {name!r}"
            )
        return self.columns[name]

    def by_class(self) -> list[Indices]:
        """Return the indices of each non-empty class, in dataset order."""
        values = self.labels if self.options.column is None else self.column(self.options.column)
        values = self.clusters if self.options.features else values
        if values is None:
            raise UserError(
                f"partition.kind = {self.options.kind!r} splits by label and the source has none; "
                "use 'iid' or 'natural', or name an integer column in partition.column"
            )
        order = torch.argsort(values, stable=True)
        _, sizes = torch.unique_consecutive(values[order], return_counts=True)
        return np.split(order.numpy(), sizes.cumsum(0)[:-1].numpy())


_Split = tuple[list[str], list[Indices]]


def _numbered(shares: list[Indices]) -> _Split:
    return [str(k) for k in range(len(shares))], shares


def _iid(task: _Task) -> _Split:
    return _numbered(split_evenly(np.arange(task.num_samples), task.options.clients, task.rng()))


def _quantity(task: _Task) -> _Split:
    options = task.options
    for attempt in range(options.retries):
        rng = task.rng(attempt)
        shares = rng.dirichlet(np.full(options.clients, options.alpha))
        sizes = largest_remainder(shares, task.num_samples)
        if sizes.min() >= options.smallest_client:
            order = rng.permutation(task.num_samples)
            return _numbered([np.sort(share) for share in np.split(order, np.cumsum(sizes)[:-1])])
    raise UserError(
        f"no draw of sizes out of {options.retries} with partition.alpha = {options.alpha:g} gave each of "
        f"{options.clients} clients at least {plural(options.smallest_client, 'image')}; raise alpha, or lower "
        "clients or min_size"
    )


def _dirichlet(task: _Task) -> _Split:
    options, by_class = task.options, task.by_class()
    variant = VARIANTS[options.variant]
    class_sizes = np.array([len(indices) for indices in by_class])
    low, high = variant.bounds(task.num_samples, options.clients)
    low = max(low, options.smallest_client)
    for attempt in range(options.retries):
        rng = task.rng(attempt)
        counts = dirichlet_counts(variant, class_sizes, options.clients, options.alpha, options.balanced, rng)
        sizes = counts.sum(axis=1)
        if low <= sizes.min() and sizes.max() <= high:
            return _numbered(split_dirichlet(variant, by_class, counts, rng))
    images = "image" if low == 1 else "images"
    bounds = f"at least {low:g} {images}" if high == np.inf else f"between {low:g} and {high:g} images"
    raise UserError(
        f"no Dirichlet draw out of {options.retries} with partition.alpha = {options.alpha:g} (variant "
        f"{options.variant!r}) gave each of {options.clients} clients {bounds} (partition.min_size = "
        f"{options.smallest_client}); raise alpha, or lower clients or min_size"
    )


def _skew(task: _Task) -> _Split:
    return _numbered(split_skewed(task.by_class(), task.options.clients, task.options.beta, task.rng()))


def _shards(task: _Task) -> _Split:
    options, by_class = task.options, task.by_class()
    S, K, C = options.classes_per_client, options.clients, len(by_class)
    if S > C or S * K < C:
        remedy = (
            "lower classes_per_client" if S > C else "raise clients or classes_per_client to use every class"
        )
        raise UserError(
            f"{K} clients with partition.classes_per_client = {S} do not fit {C} classes; {remedy}"
        )
    return _numbered(split_shards(by_class, K, S, task.rng()))


def _single_class(task: _Task) -> _Split:
    by_class = task.by_class()
    if len(by_class) != task.options.clients:
        raise UserError(
            f"partition.kind = 'single-class' needs one client for each class: there are {len(by_class)} "
            f"classes and partition.clients = {task.options.clients}; set partition.clients = {len(by_class)}"
        )
    return _numbered(by_class)


def _natural(task: _Task) -> _Split:
    if not task.columns and task.options.column is None:
        offered = f" ({', '.join(task.unread)})" if task.unread else ""
        raise UserError(
            "partition.kind = 'natural' needs a column with the client of each image, and none was read; "
            f"of Parquet, CSV, the hub and tar, name a column of texts in data.natural_column{offered}; for "
            "folders of clients, set data.source = 'clients'"
        )
    name = task.options.client_column(task.columns, task.unread)
    if name is None:
        too = f" (and data.natural_column, if it is {' or '.join(task.unread)})" if task.unread else ""
        raise UserError(
            f"partition.kind = 'natural' cannot choose among several columns; set partition.column{too} to the "
            f"column of the clients: {', '.join([*task.columns, *task.unread])}"
        )
    values = task.column(name).numpy()
    known = task.column_values.get(name)
    present = np.arange(len(known)) if known else np.unique(values)
    order = np.argsort(values, kind="stable")
    starts, ends = (np.searchsorted(values, present, side, order) for side in ("left", "right"))
    per_value = task.options.clients_per_value
    rng = task.rng()
    names: list[str] = []
    shares: list[Indices] = []
    for value, start, end in zip(present.tolist(), starts, ends, strict=True):
        label = known[value] if known else f"{name}={value}"
        names += [label] if per_value == 1 else [f"{label}/{part}" for part in range(per_value)]
        shares += split_evenly(order[start:end], per_value, rng)
    return names, shares


def _centralised(task: _Task) -> _Split:
    return ["all"], [np.arange(task.num_samples)]


_KINDS: dict[str, Callable[[_Task], _Split]] = {
    "iid": _iid,
    "quantity": _quantity,
    "dirichlet": _dirichlet,
    "skew": _skew,
    "shards": _shards,
    "single-class": _single_class,
    "natural": _natural,
    "centralised": _centralised,
}
