"""Types of the messages that server and clients exchange, and of the state that they store.

They are plain dicts (`atoll.core.tree`) in memory, on the wire and on disk, so that ``update["weights"]`` is both
typed and equal to the content of a file. The data of a single component, its slice, is stored under the component's
name. What a component sends has the form that it declares (`atoll.components.declaration`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NotRequired, TypedDict

from atoll.core.tree import Tree, Weights

Models = dict[str, Weights]  # models by name
Slices = dict[str, Tree]  # data that components send or retain, by the component's name


class ServerState(TypedDict):
    """The server's state between rounds.

    Attributes:
        models: Models by name; most aggregations have one, ``"global"``.
        parts: The components' slices.
    """

    models: Models
    parts: Slices


class Message(TypedDict):
    """The message to a client in a round.

    Attributes:
        round: The round, from 1.
        client: The client's id, from 0.
        epochs: Number of local epochs; 0 for no training.
        kept: The round of the client's valid retained state; 0 if it has none.
        models: The server's models that are sent to the client.
        parts: The components' slices.
    """

    round: int
    client: int
    epochs: int
    kept: int
    models: Models
    parts: Slices


class Update(TypedDict):
    """A client's update. `Aggregation.report` may add further keys.

    Attributes:
        weights: The trained weights, without the local-only weights.
        losses: Mean of each loss over the round, by component, and of their sum (``"loss"``).
        parts: The components' slices.
        samples: Number of the client's images, if the aggregation weights clients by it.
        batches: Number of the client's mini-batches per epoch, if the aggregation weights clients by it.
        loss: The client's mean loss in the last local epoch, if the aggregation weights clients by it.
    """

    weights: Weights
    losses: dict[str, float]
    parts: Slices
    samples: NotRequired[int]
    batches: NotRequired[int]
    loss: NotRequired[float]


class ClientState(TypedDict, total=False):
    """The state that a client retains from one of its rounds to the next.

    Attributes:
        parts: The components' slices.
        buffers: BatchNorm's running statistics, with ``train.bn_buffers = "local"``.
        personal: Trained weights that the merge or ``method.share`` leaves out of updates.
        optimizer: The optimiser's state by parameter, with ``train.keep_optimizer``.
    """

    parts: Slices
    buffers: Weights
    personal: Weights
    optimizer: Slices


class Checkpoint(TypedDict):
    """The state from which a server resumes.

    Attributes:
        round: The last complete round.
        state: The server's state after that round.
        valid: The round of each client's valid state, by client id.
        norms: Accepted distances of earlier rounds (see `UpdateChecks`).
        accepted: Other accepted magnitudes of earlier rounds, by name; missing in checkpoints of 0.1.
        constants_sent: Clients that have received the constants.
        seed: The recipe's seed, by which the checkpoints of runs that differ only in it can be told apart; missing
            in earlier checkpoints.
        missed: Number of consecutive turns so far that left the model unchanged (see `Server.run_round`); absent if
            0.
        line: The round's line of metrics; a resumed run completes it if the process was killed before the round's
            evaluation.
    """

    round: int
    state: ServerState
    valid: dict[str, int]
    norms: list[float]
    constants_sent: list[int]
    seed: NotRequired[int]
    accepted: NotRequired[dict[str, list[float]]]
    missed: NotRequired[int]
    line: NotRequired[dict[str, object]]


@dataclass(frozen=True)
class UpdateGeometry:
    """Geometry of an update w and its model g, by floating-point tensor (see `atoll.aggregation.update_geometry`).

    Attributes:
        moved: ‖w − g‖², computed from the difference (rounding errors of ‖w‖² + ‖g‖² − 2⟨g, w⟩ would dominate small
            steps).
        inner: ⟨g, w⟩.
        update: ‖w‖².
        model: ‖g‖².
    """

    moved: dict[str, float]
    inner: dict[str, float]
    update: dict[str, float]
    model: dict[str, float]

    def distance(self, without: Collection[str] = ()) -> float:
        """Return ‖w − g‖ over all tensors except these."""
        return math.sqrt(sum(moved for name, moved in self.moved.items() if name not in without))

    def norm(self, without: Collection[str] = ()) -> float:
        """Return ‖g‖ over all tensors except these."""
        return math.sqrt(sum(square for name, square in self.model.items() if name not in without))

    def cosine(self, names: Iterable[str] | None = None) -> float:
        """Return ⟨g, w⟩ / (‖g‖‖w‖) over these tensors (by default all), concatenated to one vector.

        The result is 1 if either vector is zero, and exactly 1 for equal vectors.
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
        models: Weights by name; empty if there are only personal models.
        choice: Name of the model that a client uses, by client; clients that are not listed use the first model.
    """

    models: Models
    choice: dict[int, str] = field(default_factory=dict)

    def name_of(self, client: int) -> str:
        """Return the name of the model that a client uses."""
        return self.choice.get(client, next(iter(self.models)))

    def model_of(self, client: int) -> Weights:
        """Return the model that a client uses; empty if there are only personal models."""
        return self.models[self.name_of(client)] if self.models else {}
