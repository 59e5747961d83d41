"""Which training image lies at which client: the record of a partition.

`atoll.data.partition.make.make_partition` makes one; it is written whole into a run's ``partition.json``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

from atoll.core.errors import UserError
from atoll.data.images import ImageSet
from atoll.data.options import PartitionOptions
from atoll.data.partition.iid_skew_shards import Indices


@dataclass(eq=False)
class Partition:
    """Clients' shares of a training set of `num_samples` images.

    Attributes:
        clients: One int64 tensor of indices a client; all are views of one tensor, one int64 for each image
            that a client holds.
        names: Clients' names, in the same order: the natural clients' own, otherwise their numbers.
        counts: Images by client and class, int64 (K, C); None without labels.
        label_distance: Mean L1 distance between clients' label distributions and the overall one; None
            without labels.
        options: What was asked for.
        seed: The seed that the draws came from.
        num_samples: Size of the training set; images that no client holds are the difference to the clients'
            sum.
        fingerprint: Of the training set that the indices point into.
        classes: Class names, the columns of `counts`.
    """

    clients: list[Tensor]
    names: list[str]
    counts: Tensor | None
    label_distance: float | None
    options: PartitionOptions
    seed: int
    num_samples: int
    fingerprint: str = ""
    classes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.clients)

    @property
    def sizes(self) -> list[int]:
        """How many images each client holds."""
        return [len(indices) for indices in self.clients]

    def client_ids(self, images: ImageSet) -> Tensor:
        """Which client holds each image; −1 for an image that none holds.

        All are −1 where the indices point into another set than `images`: the clients' images are elsewhere.

        Shape:
            - output: (N,) int64
        """
        ids = torch.full((len(images),), -1, dtype=torch.int64)
        if self.fingerprint == images.fingerprint:
            for client, indices in enumerate(self.clients):
                ids[indices] = client
        return ids

    def to_json(self) -> str:
        """The text of ``partition.json``: which sample went where, and why."""
        record = {
            "fingerprint": self.fingerprint,
            "num_samples": self.num_samples,
            "seed": self.seed,
            "options": asdict(self.options),
            "label_distance": self.label_distance,
            "classes": list(self.classes),
            "clients": [
                {
                    "name": name,
                    "size": len(indices),
                    "label_counts": None if self.counts is None else self.counts[k].tolist(),
                    "indices": indices.tolist(),
                }
                for k, (name, indices) in enumerate(zip(self.names, self.clients, strict=True))
            ],
        }
        return json.dumps(record) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Partition:
        """Reads what `to_json` wrote.

        Raises:
            UserError: The text is not a whole partition.
        """
        try:
            record = json.loads(text)
            clients = record["clients"]
            counts = [client["label_counts"] for client in clients]
            return cls(
                clients=join_shares([np.asarray(client["indices"], dtype=np.int64) for client in clients]),
                names=[client["name"] for client in clients],
                counts=None if None in counts else torch.tensor(counts, dtype=torch.int64),
                label_distance=record["label_distance"],
                options=PartitionOptions(**record["options"]),
                seed=record["seed"],
                num_samples=record["num_samples"],
                fingerprint=record["fingerprint"],
                classes=tuple(record["classes"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"the partition file is damaged ({error!r}); remove it, and the run makes it again"
            ) from error


def join_shares(shares: Sequence[Indices]) -> list[Tensor]:
    """The shares as views of one tensor, so that clients cost one int64 a sample and no more."""
    together = torch.from_numpy(np.concatenate(shares))
    return list(torch.tensor_split(together, np.cumsum([len(share) for share in shares])[:-1].tolist()))
