"""A method: the composition of an objective, terms, a merge, an aggregation and a server step.

Its server-side methods are pure functions of trees. A method does not depend on the engine that runs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from pathlib import Path

from torch import nn

from atoll.aggregation.fedavg import FedAvg
from atoll.aggregation.server_steps import Direct
from atoll.components.axes import STATISTICS
from atoll.components.base import (
    Aggregation,
    Component,
    Deployment,
    Forward,
    Merge,
    Objective,
    Prerequisite,
    Replace,
    ServerStep,
    Setting,
    Term,
    Trained,
)
from atoll.components.component import declares_slice
from atoll.components.declaration import mismatch
from atoll.components.messages import ClientState, Message, ServerState, Slices, Update
from atoll.components.results import returned, returned_models, sentence
from atoll.components.training import TrainOptions
from atoll.core.errors import UserError, did_you_mean, warn
from atoll.core.tree import Tree, Weights, as_sent, checked
from atoll.methods.conflicts import conflicts
from atoll.methods.round_fold import RoundFold


@dataclass(frozen=True)
class Method:
    """A federated method.

    Attributes:
        objective: The local loss.
        terms: Losses that are added to the objective, in order.
        merge: How a client combines its retained state with the weights that it downloads.
        aggregation: How the server folds updates.
        server: How the server updates its model with the folded model.
        share: Patterns over the names of the weights that clients share; None for all.
        title: The method's name as its paper writes it.
        paper: Authors, year and venue.
        family: The heading under which ``atoll methods`` lists the method.

    Example:
        >>> from atoll.methods.method import Method
        >>> from atoll.methods.ssd import DSR
        >>> from atoll.objectives.simclr import SimCLR
        >>> method = Method(objective=SimCLR(), terms=(DSR(),), title="SimCLR with DSR")
        >>> [component.name for component in method.components]
        ['simclr', 'dsr', 'replace', 'fedavg', 'direct']
    """

    objective: Objective
    terms: tuple[Term, ...] = ()
    merge: Merge = field(default_factory=Replace)
    aggregation: Aggregation = field(default_factory=FedAvg)
    server: ServerStep = field(default_factory=Direct)
    title: str = ""
    paper: str = ""
    family: str = ""
    share: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        """Check the terms; in Python, a tuple of one term without its comma is just the term.

        Raises:
            UserError: The terms are not a sequence of components, or two have the same name.
        """
        terms: object = self.terms
        if not isinstance(terms, Sequence) or not all(hasattr(one, "name") for one in terms):
            raise UserError(f"the terms of a method are {terms!r}; give a tuple, as in terms=(Mine(),)")
        names = [term.name for term in self.terms]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise UserError(f"two terms of a method have the name {twice!r}; give each a name of its own")

    @property
    def components(self) -> tuple[Component, ...]:
        """All components, in the order in which their hooks run; without terms of weight 0."""
        losses = (component for _, component in self.losses)
        return (*losses, self.merge, self.aggregation, self.server)

    @property
    def losses(self) -> list[tuple[float, Objective | Term]]:
        """The local loss as (weight, component) pairs; without terms of weight 0."""
        return [(1.0, self.objective), *((term.weight, term) for term in self.terms if term.weight != 0)]

    @property
    def forwards(self) -> tuple[Forward, ...]:
        """The forward passes of a step: those of every component, each once, in declared order."""
        return tuple(
            dict.fromkeys(forward for component in self.components for forward in component.forwards())
        )

    @property
    def images(self) -> tuple[str, ...]:
        """Images that a batch must contain: those of every pass, and those that components read without a pass."""
        passed = [forward.images for forward in self.forwards]
        return tuple(
            dict.fromkeys([*passed, *(name for component in self.components for name in component.images())])
        )

    @property
    def embeds(self) -> bool:
        """Whether a component reads embeddings; otherwise there is no projector."""
        return any(component.embeds() for component in self.components)

    @property
    def needs_labels(self) -> bool:
        """Whether a component reads labels."""
        return any(component.needs_labels for component in self.components)

    @property
    def egress(self) -> tuple[str, ...]:
        """Description of the data that leaves a client."""
        shared = self.merge.shares
        if shared and self.share is not None:
            shared += f" that match {' or '.join(self.share)}"
        weights = [shared] if shared else []
        masking = [self.aggregation.masking] if self.aggregation.masking else []
        return (*weights, *self.egress_beyond_weights, *masking)

    @property
    def egress_beyond_weights(self) -> tuple[str, ...]:
        """Description of the data that leaves a client in addition to weights."""
        numbers = [STATISTICS[name] for name in self.aggregation.statistics]
        pieces = [item for component in self.components for item in component.egress]
        return (*dict.fromkeys([*numbers, *pieces]), "the mean of each loss over the round")

    @property
    def keeps(self) -> tuple[str, ...]:
        """Description of the client state that is retained between rounds."""
        kept = (item for component in self.components for item in component.keeps)
        own = () if self.share is None else ("its trained weights that match no pattern of method.share",)
        return tuple(dict.fromkeys((*kept, *own)))

    def stateful(self, train: TrainOptions) -> bool:
        """Whether clients retain any state."""
        return bool(self.keeps) or train.bn_buffers == "local" or train.keep_optimizer

    def personalises(self, train: TrainOptions) -> bool:
        """Whether each client ends with a personal model."""
        return self.merge.personalises or train.bn_buffers == "local" or self.splits_weights

    @property
    def splits_weights(self) -> bool:
        """Whether each client trains some weights for itself, which the server does not send again."""
        return self.share is not None or bool(self.merge.local_heads)

    @property
    def hides_updates(self) -> str:
        """Reason why no client's update may be kept or measured; empty if there is none."""
        if self.aggregation.hides_updates:
            return f"{self.aggregation.name!r} must not reveal the update of a single client"
        return f"with {self.merge.name!r} no weights leave a client" if self.merge.alone else ""

    def refuse(self, setting: Setting) -> str | None:
        """Return a sentence that says why this composition cannot work in this setting, or None."""
        return next(conflicts(self, setting), None)

    def refuse_networks(self, networks: nn.ModuleDict) -> str | None:
        """Return a sentence that says why this composition cannot work with these networks, or None."""
        for head in self.merge.local_heads:
            if head not in networks:  # a misspelt one would leave the client
                return (
                    f"{self.merge.name!r}.local_heads names {head!r}, and no component adds such a head; "
                    f"{did_you_mean(head, networks)}"
                )
        hook = "refuse_networks"
        reasons = (sentence(part, hook, part.refuse_networks(networks)) for part in self.components)
        return next(filter(None, reasons), None)

    # The server's side.

    def prerequisites(self) -> dict[str, Prerequisite]:
        """Name the runs that must finish before the method can be used."""
        return {name: run for component in self.components for name, run in component.prerequisites().items()}

    def constants(self, setting: Setting, prerequisites: Mapping[str, Trained]) -> Slices:
        """Return the data that each client receives once per run."""
        made = {component.name: component.constants(setting, prerequisites) for component in self.components}
        return {name: value for name, value in checked(made, "constants").items() if value is not None}

    def init(self, setting: Setting, start: Weights) -> ServerState:
        """Return the server's initial state, from the shared initial model."""
        slices = checked({component.name: component.init(setting) for component in self.components}, "init")
        for component in filter(self.aggregation.splits, self.components):
            slices[component.name] = {str(k): slices[component.name] for k in range(setting.num_clients)}
        models = returned_models(self.aggregation, "models", self.aggregation.models(start, setting))
        state: ServerState = {
            "models": as_sent(models),
            "parts": {name: value for name, value in slices.items() if value is not None},
        }
        self._warn_of_steps(state)
        return state

    def _warn_of_steps(self, state: ServerState) -> None:
        """Warn if the server step moves a model that is no result, such as an aggregation's velocity."""
        if len(state["models"]) == 1 or type(self.server).step is ServerStep.step:
            return
        if others := state["models"].keys() - self.deploy(state).models.keys():
            warn(
                f"{self.server.name!r} also moves the model {min(others)!r} of {self.aggregation.name!r}, which is "
                "not among the models that deploy returns; if it is not to be moved, set method.server = 'direct'"
            )

    def send(
        self,
        state: ServerState,
        setting: Setting,
        client: int,
        cohort: Sequence[int],
        round: int,
        kept: int = 0,
    ) -> Message:
        """Compose the message to a client in a round.

        Args:
            state: The server's state.
            setting: Setting of the run.
            client: The client's id.
            cohort: Clients of the round, in the order of the draw.
            round: The round, from 1.
            kept: The round of the client's valid retained state; 0 if it has none.
        """
        slices = {
            component.name: component.send(self._slice(state, component, client), client, cohort, round)
            for component in self.components
        }
        aggregation = self.aggregation
        sent = {} if self.merge.alone and kept else aggregation.sent(state["models"], client)
        return {
            "round": round,
            "client": client,
            "epochs": self.epochs(setting, client, cohort, round),
            "kept": kept,
            "models": returned_models(aggregation, "sent", sent),
            "parts": {name: value for name, value in checked(slices, "send").items() if value is not None},
        }

    def epochs(self, setting: Setting, client: int, cohort: Sequence[int], round: int) -> int:
        """Return a client's local epochs in a round; 0: no training.

        Raises:
            UserError: A component's number of epochs is not a whole number of 0 or more.
        """
        for component in self.components:
            asked = component.epochs(setting, client, cohort, round)
            if asked is None:
                continue
            try:
                epochs = index(asked)  # an int, also of numpy's, which no message holds
            except TypeError:
                epochs = -1
            if epochs < 0:
                raise UserError(
                    f"{component.name!r}.epochs returns {asked!r}; return a whole number, 0 or more, or None"
                )
            return epochs
        return setting.train.epochs

    def _slice(self, state: ServerState, component: Component, client: int) -> Tree:
        """Return a component's slice of the state, as a client gets it."""
        piece = state["parts"].get(component.name)
        return (piece or {})[str(client)] if self.aggregation.splits(component) else piece

    def open(
        self, state: ServerState, setting: Setting, round: int, scratch: Path | None = None
    ) -> RoundFold:
        """Start to fold a round's updates."""
        return RoundFold(self, state, setting, round, scratch)

    def deploy(self, state: ServerState) -> Deployment:
        """Return the resulting models by name, and the model that each client uses."""
        deployed = self.aggregation.deploy(state["models"], state)
        expected = 'a Deployment, such as Deployment({"global": models["global"]})'
        return returned(self.aggregation, "deploy", deployed, Deployment, expected)

    def spent(self, setting: Setting, round: int) -> dict[str, float]:
        """Return the privacy budget spent by all rounds up to this one; empty for an aggregation without one."""
        spent = self.aggregation.spent(setting, round)
        if spent and not {"epsilon", "delta"} <= spent.keys():
            raise UserError(
                f"{self.aggregation.name!r}.spent returns {spent!r}; return "
                '{"epsilon": …, "delta": …}, which the report shows, or {}'
            )
        return spent

    def personal(self, deployment: Deployment, client: int, retained: ClientState | None) -> Weights:
        """Return the model that a client uses: the model chosen for it, combined with its retained state."""
        retained = retained if retained is not None else ClientState()
        own = {**retained.get("personal", {}), **retained.get("buffers", {})}
        weights = {**deployment.model_of(client), **own}
        return self.merge.personal(weights, retained.get("parts", {}).get(self.merge.name))

    def refuse_update(self, update: Update, setting: Setting) -> str | None:
        """Return a sentence that says what is wrong with the components' slices of an update, or None."""
        others = update["parts"].keys() - {c.name for c in self.components if self.aggregation.splits(c)}
        if self.aggregation.only_weights and others:
            return (
                f"it holds more than weights ({', '.join(map(repr, sorted(others)))}), and "
                f"{self.aggregation.name!r} covers those only"
            )
        for component in self.components:
            piece = update["parts"].get(component.name)
            reason = _undeclared(component, piece, setting, update["weights"])
            reason = reason or component.refuse_slice(piece, setting, update["weights"])
            if reason:
                return reason
        return None


def _undeclared(component: Component, piece: Tree, setting: Setting, weights: Weights) -> str | None:
    """Return a sentence that says how a slice differs from its component's declaration, or None."""
    if not declares_slice(type(component)):  # written for 0.1: `refuse_slice` alone decides
        return None
    declared = component.declares(setting)
    if declared is None:
        return f"it holds a slice of {component.name!r}, which sends none" if piece is not None else None
    return mismatch(declared, piece, weights, f"its slice of {component.name!r}")
