"""The record of a partition: the assignment of training images to clients.

`atoll.data.partition.make.make_partition` creates a partition; a run's ``partition.json`` contains the whole
record.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atoll.core.errors import UserError
from atoll.data.images import ImageSet
from atoll.data.options import PartitionOptions
from atoll.data.partition.iid_skew_shards import Indices
from atoll.functional import label_distance


@dataclass(eq=False)
class Partition:
    """Clients' shares of a training set of `num_samples` images.

    Attributes:
        clients: One int64 tensor of indices per client; all are views of one tensor, with one int64 for each image
            that a client holds.
        names: Names of the clients, in the same order: those of natural clients, otherwise numbers.
        counts: Number of images by client and class, int64 (K, C); None without labels.
        options: The recipe's ``[partition]`` section.
        seed: The seed of the draws.
        num_samples: Size of the training set; it may exceed the sum of the clients' sizes, because images may be
            unassigned.
        fingerprint: Fingerprint of the training set to which the indices refer.
        classes: Class names, the columns of `counts`.
        sit_out: Clients that are too small to take part, by name, with their number of images.
        cluster_counts: Number of images by client and feature cluster, int64 (K, clusters); None without clusters.
        shifts: Shift of each client's images in words; empty if the recipe has none.
    """

    clients: list[Tensor]
    names: list[str]
    counts: Tensor | None
    options: PartitionOptions
    seed: int
    num_samples: int
    fingerprint: str = ""
    classes: tuple[str, ...] = ()
    sit_out: dict[str, int] = field(default_factory=dict)
    cluster_counts: Tensor | None = None
    shifts: tuple[str, ...] = ()

    @classmethod
    def consecutive(
        cls,
        sizes: Sequence[int],
        names: Sequence[str],
        options: PartitionOptions,
        seed: int,
        fingerprint: str = "",
        classes: Sequence[str] = (),
    ) -> Partition:
        """Give each client as many consecutive images of the set as its size; labels are not counted."""
        total = sum(sizes)
        shares = list(torch.split(torch.arange(total), list(sizes)))
        return cls(shares, list(names), None, options, seed, total, fingerprint, tuple(classes))

    def __len__(self) -> int:
        return len(self.clients)

    @property
    def sizes(self) -> list[int]:
        """Number of images of each client."""
        return [len(indices) for indices in self.clients]

    @property
    def label_distance(self) -> float | None:
        """Mean L1 distance of the clients' label distributions from the overall one; None without labels."""
        return None if self.counts is None else float(label_distance(self.counts))

    def distances(self) -> list[float] | None:
        """L1 distance of each client's label distribution from the overall one; `label_distance` is their mean."""
        if self.counts is None:
            return None
        shares = self.counts / self.counts.sum(1, keepdim=True)
        overall = self.counts.sum(0) / self.counts.sum()
        found: list[float] = (shares - overall).abs().sum(1).tolist()
        return found

    def client_ids(self, images: ImageSet) -> Tensor:
        """Return the client of each image; −1 for an image without a client.

        All values are −1 if the indices refer to another set than `images`.

        Args:
            images: The image set.

        Shape:
            - output: (N,) int64
        """
        ids = torch.full((len(images),), -1, dtype=torch.int64)
        if self.fingerprint == images.fingerprint:
            owners = torch.arange(len(self.clients)).repeat_interleave(torch.tensor(self.sizes))
            ids[torch.cat(self.clients)] = owners
        return ids

    def without_small(self, least: int) -> Partition:
        """Return the partition without the clients that hold fewer than `least` images, which then sit out.

        With a small Dirichlet α and many clients, some clients get only one image, which has no negatives and which
        BatchNorm cannot normalise. With loaders that drop the last batch (SSD's, FedU²'s), such clients take no
        step.

        Raises:
            UserError: No client is left.
        """
        kept = [k for k, size in enumerate(self.sizes) if size >= least]
        if len(kept) == len(self):
            return self
        if not kept:
            raise UserError(
                f"all {len(self)} clients have fewer than {least} images (partition.sit_out_below), so none is "
                "left to train; lower it, use fewer clients or load more images"
            )
        return replace(
            self,
            clients=[self.clients[k] for k in kept],
            names=[self.names[k] for k in kept],
            counts=None if self.counts is None else self.counts[kept],
            cluster_counts=None if self.cluster_counts is None else self.cluster_counts[kept],
            sit_out={self.names[k]: size for k, size in enumerate(self.sizes) if size < least},
        )

    def to_json(self) -> str:
        """Format the text of ``partition.json``: the assignment, and the options and seed that determine it."""
        record: dict[str, Any] = {
            "fingerprint": self.fingerprint,
            "num_samples": self.num_samples,
            "seed": self.seed,
            "options": asdict(self.options),
            "label_distance": self.label_distance,
            "classes": list(self.classes),
            "clients": [
                {"name": name, **facts, "indices": indices.tolist()}
                for name, facts, indices in zip(self.names, self._facts(), self.clients, strict=True)
            ],
        }
        if self.sit_out:
            record["sit_out"] = self.sit_out
        return json.dumps(record) + "\n"

    def _facts(self) -> Iterator[dict[str, Any]]:
        """Entries of the record, one for each client."""
        counts = None if self.counts is None else self.counts.tolist()
        clusters = None if self.cluster_counts is None else self.cluster_counts.tolist()
        for k, size in enumerate(self.sizes):
            facts: dict[str, Any] = {"size": size, "label_counts": None if counts is None else counts[k]}
            if clusters is not None:
                facts["cluster_counts"] = clusters[k]
            if self.shifts:
                facts["shift"] = self.shifts[k]
            yield facts

    @classmethod
    def from_json(cls, text: str) -> Partition:
        """Parse a text that `to_json` wrote.

        Raises:
            UserError: The text is not a complete partition.
        """
        try:
            record = json.loads(text)
            clients = record["clients"]
            counts = [client["label_counts"] for client in clients]
            clusters = [client.get("cluster_counts") for client in clients]
            return cls(
                clients=join_shares([np.asarray(client["indices"], dtype=np.int64) for client in clients]),
                names=[client["name"] for client in clients],
                counts=None if None in counts else torch.tensor(counts, dtype=torch.int64),
                options=PartitionOptions(**record["options"]),
                seed=record["seed"],
                num_samples=record["num_samples"],
                fingerprint=record["fingerprint"],
                classes=tuple(record["classes"]),
                sit_out=record.get("sit_out", {}),
                cluster_counts=None if None in clusters else torch.tensor(clusters, dtype=torch.int64),
                shifts=tuple(client["shift"] for client in clients if "shift" in client),
            )
        except (KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
            raise UserError(f"it does not describe a partition: {error!r}") from error


def join_shares(shares: Sequence[Indices]) -> list[Tensor]:
    """Concatenate the shares and return views of one tensor, so that clients need one int64 per sample."""
    together = torch.from_numpy(np.concatenate(shares))
    return list(torch.tensor_split(together, np.cumsum([len(share) for share in shares])[:-1].tolist()))
