"""The contract's small change: what a method is made of, and what a client's components share while it trains.

A method composes an objective, terms, a merge, an aggregation and a server step (see `atoll.methods`). Each is
a `Component`: a frozen dataclass whose fields are its options in a recipe, with hooks for both sides. Components
never know which engine runs them, and every hook has a default that does nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

from atoll.components.context import (
    ClientContext,
    Features,
    Forward,
    Passes,
    Scope,
    Setting,
    init_seed,
    run_forwards,
    seeded,
)
from atoll.core.errors import UserError
from atoll.core.tree import Tree, Weights
from atoll.data.batch import Batch, ClientData
from atoll.data.images import Pixels

# One import for whoever writes a component.
__all__ = [
    "Aggregation",
    "Batch",
    "ClientContext",
    "ClientData",
    "Component",
    "Deployment",
    "Features",
    "Fold",
    "Forward",
    "Merge",
    "Objective",
    "Passes",
    "Prerequisite",
    "Scope",
    "ServerStep",
    "Setting",
    "SliceFold",
    "Term",
    "Trained",
    "init_seed",
    "require_positive",
    "run_forwards",
    "seeded",
]


@dataclass(frozen=True)
class Prerequisite:
    """A run that a component needs first: centralised, resumable, in the run's own folder.

    Its networks are built as this run's are, from the same ``[model]`` section and for images of the same form.

    Attributes:
        recipe: a preset's name or a TOML file that describes it whole; empty: it has this run's seed, views,
            networks, training and engine.
        settings: what is laid over those, by section and key.
    """

    recipe: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Trained:
    """What came of a `Prerequisite`.

    Attributes:
        weights: of all its networks.
        images: what they learnt from.
    """

    weights: Weights
    images: Pixels


@dataclass(frozen=True)
class Component:
    """A piece of a method; its dataclass fields are its options in a recipe.

    Class attributes:
        name: in recipes, states and messages.
        source: paper and equation.
        needs_labels: the component reads ``batch.labels``.
    """

    name: ClassVar[str] = ""
    source: ClassVar[str] = ""
    needs_labels: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        """Refuse an option that would take the place of a hook or of a class attribute, unnoticed.

        Raises:
            UserError: a field is named like something that components have already and that is no option.
        """
        super().__init_subclass__()
        inherited = {option.name for base in cls.__bases__ if is_dataclass(base) for option in fields(base)}
        for name, hint in inspect.get_annotations(cls).items():
            if "ClassVar" not in str(hint) and name not in inherited and hasattr(super(cls, cls), name):
                raise UserError(
                    f"{cls.__qualname__}.{name} is an option named like a part's own {name!r}, which it would "
                    "replace; give it another name"
                )

    # What depends on no option may be a class variable in a component, as most are.

    @property
    def egress(self) -> tuple[str, ...]:
        """What leaves a client because of this component, beyond weights, in words."""
        return ()

    @property
    def keeps(self) -> tuple[str, ...]:
        """What a client keeps for this component from round to round, in words."""
        return ()

    def refuse(self, setting: Setting) -> str | None:
        """A sentence that says why this component cannot work in this setting, or None."""
        return None

    def refuse_networks(self, networks: nn.ModuleDict) -> str | None:
        """A sentence that says why this component cannot work with these networks, or None."""
        return None

    def heads(self, setting: Setting) -> dict[str, nn.Module]:
        """Networks that this component adds; they train and travel like the encoder."""
        return {}

    def embeds(self) -> bool:
        """Whether this component reads embeddings; where no component does, there is no projector."""
        return False

    # The server's side.

    def prerequisites(self) -> dict[str, Prerequisite]:
        """Runs that this component needs first, by name."""
        return {}

    def constants(self, setting: Setting, prerequisites: Mapping[str, Trained]) -> Tree:
        """What each client gets once and for all."""
        return None

    def init(self, setting: Setting) -> Tree:
        """The part's slice of server state."""
        return None

    def send(self, state: Tree, client: int, cohort: Sequence[int], round: int) -> Tree:
        """The part's slice of the message to a client; ``cohort`` in the order in which it was drawn."""
        return None

    def epochs(self, setting: Setting, client: int, cohort: Sequence[int], round: int) -> int | None:
        """Local epochs of a client in a round, where the component decides on them; 0: no training."""
        return None

    def fold(self, state: Tree, setting: Setting, round: int) -> SliceFold | None:
        """A fold of the slices that clients return into the next slice of server state."""
        return None

    def refuse_slice(self, piece: Tree, setting: Setting, weights: Weights) -> str | None:
        """What is wrong with a client's slice, as "it …"; ``weights`` of the same update are in order.

        Tensors that are not finite are found before.
        """
        return None

    # The client's side.

    def forwards(self) -> Sequence[Forward]:
        """The passes that `loss` reads, in order."""
        return ()

    def start(self, context: ClientContext) -> None:
        """Before the first step."""

    def images(self) -> Sequence[str]:
        """Images of a batch that `inputs` or `loss` reads without a declared pass, by name."""
        return ()

    def inputs(self, context: ClientContext, batch: Batch) -> dict[str, Tensor]:
        """Further images of a batch, by name."""
        return {}

    def after_step(self, context: ClientContext) -> None:
        """After each optimiser step: momentum targets, queues."""

    def finish(self, context: ClientContext) -> Tree:
        """The part's slice of the update."""
        return None

    def keep(self, context: ClientContext) -> Tree:
        """What the client keeps for this component until its next round."""
        return None


def require_positive(component: Component, *options: str) -> None:
    """Check some of a part's options.

    Raises:
        UserError: one of them is not above 0.
    """
    for option in options:
        value = getattr(component, option)
        if not value > 0:
            raise UserError(f"options.{component.name}.{option} is {value}; it must be above 0")


class SliceFold(Protocol):
    """Takes slices one at a time, in client-id order."""

    def add(self, client: int, piece: Tree) -> None:
        """Fold in one client's slice."""
        ...

    def close(self) -> Tree:
        """The next slice of server state."""
        ...


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
    """A loss that is added to the objective, times ``weight``; with weight 0 it is left out entirely."""

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
class Deployment:
    """The models that result from a run.

    Attributes:
        models: weights by name; empty where each client has only its own.
        choice: the model that a client uses, by client; those not named use the first.
    """

    models: dict[str, Weights]
    choice: dict[int, str] = field(default_factory=dict)


class Fold(Protocol):
    """A round's aggregation: takes updates one at a time, in client-id order."""

    def add(self, client: int, update: Tree) -> None:
        """Fold in one client's update; ``"measure"`` in it is its `UpdateGeometry`."""
        ...

    def close(self) -> Tree:
        """The server's next models."""
        ...


@dataclass(frozen=True)
class Aggregation(Component):
    """The server's fold of updates into its next models.

    Class attributes:
        whole_cohort: the mathematics needs all updates at once; they spill to disk.
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

    def spent(self, setting: Setting, round: int) -> dict[str, Any]:
        """What of clients' privacy all rounds up to this one have spent, for the log."""
        return {}

    def models(self, start: Weights, setting: Setting) -> Tree:
        """The server's first models, from the one initial model."""
        return {"global": start}

    def open(self, models: Tree, setting: Setting, round: int, scratch: Path | None) -> Fold:
        """Begin a round's fold; ``scratch`` is a folder for what does not fit in memory."""
        raise NotImplementedError

    def choose(self, context: ClientContext, models: Tree) -> Weights:
        """On the client: the weights to begin with, out of those it was sent."""
        weights: Weights = models["global"]
        return weights

    def report(self, context: ClientContext) -> Tree:
        """On the client: what the fold needs beside the weights and `statistics`."""
        return {}

    def sent(self, models: Tree, client: int) -> Tree:
        """On the server: the models that a client is sent."""
        return models

    def reference(self, models: Tree, update: Tree) -> Weights:
        """Of the models that a client was sent, the one that its update set out from, as the door measures it."""
        weights: Weights = models["global"]
        return weights

    def deploy(self, models: Tree, state: Tree) -> Deployment:
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
