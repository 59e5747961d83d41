"""The axes along which a method is composed: objective, terms, merge, aggregation and server step."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch import Tensor, nn

from atoll.components.component import Component
from atoll.components.context import ClientContext
from atoll.components.folds import Fold
from atoll.components.forwards import Passes
from atoll.components.messages import Deployment, Models, ServerState, Update
from atoll.components.setting import Setting
from atoll.core.errors import UserError
from atoll.core.tree import Tree, Weights
from atoll.data.batch import Batch

# What an update may contain in addition to weights and losses, in words for a data owner.
STATISTICS = {
    "samples": "its number of samples",
    "batches": "its number of batches",
    "loss": "its mean loss in the last local epoch",
}


@dataclass(frozen=True)
class Objective(Component):
    """The local loss."""

    @property
    def least_loss(self) -> float:
        """Lower bound of `loss`, below which updates are refused; −∞ if none holds for all networks and images."""
        return -math.inf

    @property
    def idle_rounds(self) -> str:
        """If there are rounds in which no client trains, the setting that avoids them; otherwise empty."""
        return ""

    def classifier(self) -> tuple[str, ...] | None:
        """Names of the networks from images to class logits, if the objective trains a classifier."""
        return None

    def embeds(self) -> bool:
        """Return True: most self-supervised losses read embeddings."""
        return True

    def loss(self, context: ClientContext, batch: Batch, passes: Passes) -> Tensor:
        """Return the scalar loss to minimise."""
        raise UserError(f"{type(self).__qualname__} has no method loss(context, batch, passes); add it")


@dataclass(frozen=True)
class Term(Component):
    """A loss that is added to the objective, times ``weight``; with weight 0 it is removed from the method.

    Attributes:
        weight: Factor of the term in the loss; 0 removes the term.
    """

    weight: float = 1.0

    @property
    def least_loss(self) -> float:
        """Lower bound of `loss`, below which updates are refused; −∞ if none holds for all networks and images."""
        return -math.inf

    def embeds(self) -> bool:
        """Return True: most terms read embeddings."""
        return True

    def loss(self, context: ClientContext, batch: Batch, passes: Passes) -> Tensor:
        """Return the scalar loss, before the weight is applied."""
        raise UserError(f"{type(self).__qualname__} has no method loss(context, batch, passes); add it")


@dataclass(frozen=True)
class Merge(Component):
    """How a client combines its retained state with the weights that it downloads.

    Class attributes:
        personalises: Each client ends with a separate model (see `personal`).
        alone: The server sends no model to a client that already has one.
        shares: Description of the weights that leave a client; empty if none do.
        local_heads: Names of heads whose weights each client trains for itself. They never leave it: the client
            gets their initial values once, and retains what it trains.
    """

    personalises: ClassVar[bool] = False
    alone: ClassVar[bool] = False
    local_heads: ClassVar[tuple[str, ...]] = ()
    shares: ClassVar[str] = "the weights of all trained networks"

    @property
    def replaces(self) -> bool:
        """Whether training starts from the downloaded weights, unchanged."""
        return type(self).join is Merge.join

    def join(self, context: ClientContext, downloaded: Weights) -> Weights:
        """Return the weights from which training starts.

        Weights that the client trained for itself, by `local_heads` or ``method.share``, then replace these.
        """
        return downloaded

    def private(self, networks: nn.ModuleDict) -> set[str]:
        """Names of weights that never leave the client."""
        return set()

    def personal(self, weights: Weights, retained: Tree) -> Weights:
        """Return the client's personal model.

        Args:
            weights: The shared weights; those that only this client trains, by `local_heads`, ``method.share`` or
                ``train.bn_buffers``, are its own.
            retained: The merge's slice of the client's retained state.
        """
        return weights


@dataclass(frozen=True)
class Aggregation(Component):
    """The server's fold of updates into its next models.

    Class attributes:
        whole_cohort: The computation needs all updates at once; they are buffered on disk.
        only_weights: The aggregation requires that only weights leave a client.
        clips: The aggregation itself clips updates; whether a client's update is accepted must not depend on the
            updates of other clients.
        serverless: The clients hold the models, and no server can take a server step.
        hides_updates: The aggregation must not reveal the update of a single client, so none may be kept or
            measured.
        keeps_updates: The fold may keep an update's weights after `add`, as a median does. If clients train in the
            networks of one process, these weights are therefore copied; a fold that uses them at once saves the
            copy.
        masking: Description of how all that a client sends is hidden from the server, if it is.
    """

    whole_cohort: ClassVar[bool] = False
    only_weights: ClassVar[bool] = False
    clips: ClassVar[bool] = False
    serverless: ClassVar[bool] = False
    hides_updates: ClassVar[bool] = False
    keeps_updates: ClassVar[bool] = True
    masking: ClassVar[str] = ""

    def splits(self, component: Component) -> bool:
        """Return whether each client has its own slice of a component's state, because there is no server."""
        return self.serverless and component.between_neighbours

    @property
    def statistics(self) -> tuple[str, ...]:
        """Numbers that an update must contain: ``"samples"``, ``"batches"``, ``"loss"`` (of the last epoch)."""
        return ()

    @property
    def least_updates(self) -> int:
        """Smallest number of updates that can be aggregated; a round with fewer fails."""
        return 1

    def refuse(self, setting: Setting) -> str | None:
        """Refuse cohorts of fewer clients than `least_updates`."""
        if (clients := self.cohort_size(setting)) >= self.least_updates:
            return None
        return (
            f"{self.name!r} needs at least {self.least_updates} updates in a round, and there are {clients}; "
            "set train.participation higher, or choose another aggregation"
        )

    def cohort(self, setting: Setting, round: int) -> list[int] | None:
        """Draw the clients of a round (possibly none), or return None for the default draw.

        Aggregations override this hook if their mathematics prescribes how clients are drawn.
        """
        return None

    def cohort_size(self, setting: Setting) -> int:
        """Return the number of clients in a round, the smallest if rounds differ; override it with `cohort`."""
        return setting.train.cohort_size(setting.num_clients)

    def fewest_clients(self, setting: Setting) -> int:
        """Return the smallest number of clients that a round may have: `cohort_size`, unless it is random."""
        return self.cohort_size(setting)

    def turns(self, setting: Setting) -> int:
        """Return the number of rounds between two turns of a client, if clients take turns; otherwise 1."""
        return 1

    def spent(self, setting: Setting, round: int) -> dict[str, float]:
        """Return the privacy budget spent by all rounds up to this one, for the log."""
        return {}

    def measure(self, models: Models, setting: Setting, round: int) -> dict[str, float]:
        """Return the aggregation's own measurements of its models after a round, for ``evaluation.measures``."""
        return {}

    def neighbourhoods(self, setting: Setting, round: int) -> Sequence[Collection[int]]:
        """Without a server: return for each client those whose updates reach it in a round, itself included."""
        return ()

    def models(self, start: Weights, setting: Setting) -> Models:
        """Return the server's initial models, from the shared initial model."""
        return {"global": start}

    def open(self, models: Models, setting: Setting, round: int, scratch: Path | None) -> Fold:
        """Start a round's fold; ``scratch`` is a folder for data that does not fit in memory."""
        raise UserError(
            f"{type(self).__qualname__} has no method open(models, setting, round, scratch); add it"
        )

    def choose(self, context: ClientContext, models: Models) -> Weights:
        """On the client: choose the initial weights among the received models."""
        return models["global"]

    def report(self, context: ClientContext) -> Mapping[str, Tree]:
        """On the client: return what the fold needs in addition to the weights and `statistics`."""
        return {}

    def sent(self, models: Models, client: int) -> Models:
        """On the server: select the models to send to a client."""
        return models

    def reference(self, models: Models, update: Update) -> Weights:
        """On the server: return the model, among those sent to a client, from which its update started."""
        return models["global"]

    def deploy(self, models: Models, state: ServerState) -> Deployment:
        """Return the named models of the finished run."""
        return Deployment(dict(models))


@dataclass(frozen=True)
class ServerStep(Component):
    """How the server updates its model with the folded model: by replacement or by a gradient step."""

    def step(self, state: Tree, current: Weights, folded: Weights, setting: Setting) -> tuple[Tree, Weights]:
        """Return the next slice of state (None before the first round) and the next weights."""
        return state, folded


@dataclass(frozen=True)
class Replace(Merge):
    """w_k ← w: the client's networks are replaced by the downloaded ones (FedAvg)."""

    name: ClassVar[str] = "replace"
    source: ClassVar[str] = "McMahan et al. 2017, Algorithm 1"
