"""The axes along which a method is composed: objective, terms, merge, aggregation and server step."""

from __future__ import annotations

from collections.abc import Mapping
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
from atoll.core.tree import Tree, Weights
from atoll.data.batch import Batch


@dataclass(frozen=True)
class Objective(Component):
    """The local loss."""

    def classifier(self) -> tuple[str, ...] | None:
        """The networks that make class logits of images, if the objective trains a classifier."""
        return None

    def embeds(self) -> bool:
        """Most self-supervised losses do."""
        return True

    def loss(self, context: ClientContext, batch: Batch, passes: Passes) -> Tensor:
        """A scalar tensor to minimise."""
        raise NotImplementedError


@dataclass(frozen=True)
class Term(Component):
    """A loss that is added to the objective, times ``weight``; with weight 0 it is left out entirely.

    Attributes:
        weight: the term's factor in the loss; 0 leaves it out.
    """

    weight: float = 1.0

    def embeds(self) -> bool:
        """Most terms do."""
        return True

    def loss(self, context: ClientContext, batch: Batch, passes: Passes) -> Tensor:
        """A scalar tensor, before the weight."""
        raise NotImplementedError


@dataclass(frozen=True)
class Merge(Component):
    """How a client joins its own state with what it downloads.

    Class attributes:
        personalises: each client ends with a model of its own (see `personal`).
        alone: a client that has a model is sent no other.
        shares: which weights leave a client, in words; empty: none.
    """

    personalises: ClassVar[bool] = False
    alone: ClassVar[bool] = False
    shares: ClassVar[str] = "the weights of all trained networks"

    def join(self, context: ClientContext, downloaded: Weights) -> Weights:
        """The weights that training starts from."""
        return downloaded

    def private(self, networks: nn.ModuleDict) -> set[str]:
        """Names of weights that never leave the client."""
        return set()

    def personal(self, weights: Weights, retained: Tree) -> Weights:
        """The client's own model, given the one it shares with others and what it kept."""
        return weights


@dataclass(frozen=True)
class Aggregation(Component):
    """The server's fold of updates into its next models.

    Class attributes:
        whole_cohort: the mathematics needs all updates at once; they are buffered on disk.
        only_weights: works only where nothing but weights leaves a client.
        clips: it cuts updates to a bound of its own, and what other clients sent must not decide on a client's.
        serverless: the clients hold the models, and nobody is there to take a server step.
    """

    whole_cohort: ClassVar[bool] = False
    only_weights: ClassVar[bool] = False
    clips: ClassVar[bool] = False
    serverless: ClassVar[bool] = False

    @property
    def statistics(self) -> tuple[str, ...]:
        """The numbers an update must carry: ``"samples"``, ``"batches"``, ``"loss"`` (of the last epoch)."""
        return ()

    def cohort(self, setting: Setting, round: int) -> list[int] | None:
        """The clients of a round, where the mathematics prescribes how they are drawn; maybe none."""
        return None

    def spent(self, setting: Setting, round: int) -> dict[str, float]:
        """What of clients' privacy all rounds up to this one have spent, for the log."""
        return {}

    def models(self, start: Weights, setting: Setting) -> Models:
        """The server's first models, from the one initial model."""
        return {"global": start}

    def open(self, models: Models, setting: Setting, round: int, scratch: Path | None) -> Fold:
        """Begin a round's fold; ``scratch`` is a folder for what does not fit in memory."""
        raise NotImplementedError

    def choose(self, context: ClientContext, models: Models) -> Weights:
        """On the client: the weights to begin with, out of those it was sent."""
        return models["global"]

    def report(self, context: ClientContext) -> Mapping[str, Tree]:
        """On the client: what the fold needs beside the weights and `statistics`."""
        return {}

    def sent(self, models: Models, client: int) -> Models:
        """On the server: the models that a client is sent."""
        return models

    def reference(self, models: Models, update: Update) -> Weights:
        """Of the models that a client was sent, the one that its update started from."""
        return models["global"]

    def deploy(self, models: Models, state: ServerState) -> Deployment:
        """The named models of the finished run."""
        return Deployment(dict(models))


@dataclass(frozen=True)
class ServerStep(Component):
    """What the server does with the folded model: takes it as it is, or treats it as a gradient."""

    def step(self, state: Tree, current: Weights, folded: Weights, setting: Setting) -> tuple[Tree, Weights]:
        """The next slice of state (None before the first round) and the next weights."""
        return state, folded


@dataclass(frozen=True)
class Replace(Merge):
    """w_k ← w: the client's networks are replaced by the downloaded ones (FedAvg)."""

    name: ClassVar[str] = "replace"
    source: ClassVar[str] = "McMahan et al. 2017, Algorithm 1"
