"""The named forms of what server and clients exchange and keep.

They are plain dicts (`atoll.core.tree`), on the wire and on disk as in memory, so that ``update["weights"]`` is
both what a type checker reads and what a file holds. What a single component sends or keeps, its slice, lies in
them under the component's name, and has the form that the component declares (`atoll.components.declaration`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NotRequired, TypedDict

from atoll.core.tree import Tree, Weights

Models = dict[str, Weights]  # models by name
Slices = dict[str, Tree]  # what components send or keep, by the component's name


class ServerState(TypedDict):
    """What the server holds between rounds.

    Attributes:
        models: by name; most aggregations have one, ``"global"``.
        parts: the components' slices.
    """

    models: Models
    parts: Slices


class Message(TypedDict):
    """All that a client gets in a round.

    Attributes:
        round: from 1.
        client: id, from 0.
        epochs: how long to train; 0: not at all.
        kept: the round after which the client kept the state that is valid; 0: it has none.
        models: what it is sent of the server's models.
        parts: the components' slices.
    """

    round: int
    client: int
    epochs: int
    kept: int
    models: Models
    parts: Slices


class Update(TypedDict):
    """What a client returns. An aggregation's `Aggregation.report` may add further keys.

    Attributes:
        weights: as trained, without those that never leave the client.
        losses: the mean of each loss over the round, by component, and of their sum (``"loss"``).
        parts: the components' slices.
        samples: the client's images, where the aggregation weighs by them.
        batches: its mini-batches in an epoch, likewise.
        loss: its mean loss in the last local epoch, likewise.
    """

    weights: Weights
    losses: dict[str, float]
    parts: Slices
    samples: NotRequired[int]
    batches: NotRequired[int]
    loss: NotRequired[float]


class ClientState(TypedDict, total=False):
    """What a client keeps from one of its rounds to the next.

    Attributes:
        parts: the components' slices.
        buffers: BatchNorm's running statistics, where ``train.bn_buffers = "local"``.
        optimizer: the optimiser's state by parameter, where ``train.keep_optimizer``.
    """

    parts: Slices
    buffers: Weights
    optimizer: Slices


class Checkpoint(TypedDict):
    """All that a resumed server needs.

    Attributes:
        round: the newest complete one.
        state: after it.
        valid: the round of each client's valid state, by client id.
        norms: accepted distances of earlier rounds (see `UpdateChecks`).
        constants_sent: the clients that have the constants.
        line: the round's line of metrics, which is completed on resumption if a kill came before its evaluation.
    """

    round: int
    state: ServerState
    valid: dict[str, int]
    norms: list[float]
    constants_sent: list[int]
    line: NotRequired[dict[str, object]]


@dataclass(frozen=True)
class UpdateGeometry:
    """An update w next to its model g, for each floating-point tensor (see `atoll.aggregation.update_geometry`).

    Attributes:
        moved: ‖w − g‖², from the difference itself (‖w‖² + ‖g‖² − 2⟨g, w⟩ would drown small steps in rounding).
        inner: ⟨g, w⟩.
        update: ‖w‖².
        model: ‖g‖².
    """

    moved: dict[str, float]
    inner: dict[str, float]
    update: dict[str, float]
    model: dict[str, float]

    def distance(self, without: Collection[str] = ()) -> float:
        """‖w − g‖ over all tensors but these."""
        return math.sqrt(sum(moved for name, moved in self.moved.items() if name not in without))

    def cosine(self, names: Iterable[str] | None = None) -> float:
        """⟨g, w⟩ / (‖g‖‖w‖) over these tensors taken as one vector, or over all; 1 where either is zero.

        Equal vectors give exactly 1.
        """
        names = list(self.moved if names is None else names)
        inner, update, model = (
            sum(values[name] for name in names) for values in (self.inner, self.update, self.model)
        )
        scale = math.sqrt(update) * math.sqrt(model) if update != model else update
        return min(max(inner / scale, -1.0), 1.0) if scale > 0 else 1.0


@dataclass(frozen=True)
class Deployment:
    """The models that result from a run.

    Attributes:
        models: weights by name; empty where each client has only its own.
        choice: the model that a client uses, by client; those not named use the first.
    """

    models: Models
    choice: dict[int, str] = field(default_factory=dict)
