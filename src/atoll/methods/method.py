"""A method: four axes and a server step, composed; its server side and its client side.

The server's side is a set of pure functions of trees, the client's side an object that a worker reuses for one
client after the other. Engines call these and nothing else; neither side knows where it runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from atoll.aggregation.fedavg import FedAvg
from atoll.methods.merge import Replace
from atoll.methods.server import Direct
from atoll.parts import (
    Aggregation,
    Deployment,
    Fold,
    Forward,
    Merge,
    Objective,
    Part,
    Prerequisite,
    ServerStep,
    Setting,
    SliceFold,
    Term,
    Trained,
)
from atoll.training import TrainOptions
from atoll.tree import Tree, Weights


@dataclass(frozen=True)
class Method:
    """A federated method.

    Attributes:
        objective: the local loss.
        terms: what is added to it, in order.
        merge: how a client joins its own state with what it downloads.
        aggregation: how the server folds updates.
        server: what the server does with the folded model.
        title: the method's name as its paper writes it.
        paper: authors, year and where it appeared.
        family: the heading under which ``atoll methods`` lists it.
    """

    objective: Objective
    terms: tuple[Term, ...] = ()
    merge: Merge = field(default_factory=Replace)
    aggregation: Aggregation = field(default_factory=FedAvg)
    server: ServerStep = field(default_factory=Direct)
    title: str = ""
    paper: str = ""
    family: str = ""

    @property
    def parts(self) -> tuple[Part, ...]:
        """All parts, in the order in which their hooks run; terms of weight 0 are left out."""
        terms = [term for term in self.terms if term.weight != 0]
        return (self.objective, *terms, self.merge, self.aggregation, self.server)

    @property
    def losses(self) -> list[tuple[float, Objective | Term]]:
        """The local loss as (weight, part) pairs."""
        return [(1.0, self.objective), *((term.weight, term) for term in self.terms if term.weight != 0)]

    @property
    def forwards(self) -> tuple[Forward, ...]:
        """The passes of a step: those of every part, each once, in declared order."""
        return tuple(dict.fromkeys(forward for part in self.parts for forward in part.forwards()))

    @property
    def images(self) -> tuple[str, ...]:
        """What a batch must hold: the images of every pass, and those that parts read without one."""
        passed = [forward.images for forward in self.forwards]
        return tuple(dict.fromkeys([*passed, *(name for part in self.parts for name in part.images())]))

    @property
    def needs_labels(self) -> bool:
        """Whether a part reads labels."""
        return any(part.needs_labels for part in self.parts)

    @property
    def egress(self) -> tuple[str, ...]:
        """What leaves a client, in words."""
        weights = [self.merge.shares] if self.merge.shares else []
        return (*weights, *self.egress_beyond_weights)

    @property
    def egress_beyond_weights(self) -> tuple[str, ...]:
        """What else leaves a client, in words."""
        numbers = [_STATISTICS[name] for name in self.aggregation.statistics]
        pieces = [item for part in self.parts for item in part.egress]
        return (*dict.fromkeys([*numbers, *pieces]), "the mean of each loss over the round")

    @property
    def keeps(self) -> tuple[str, ...]:
        """What a client keeps from round to round, in words."""
        return tuple(dict.fromkeys(item for part in self.parts for item in part.keeps))

    def stateful(self, train: TrainOptions) -> bool:
        """Whether clients keep anything at all."""
        return bool(self.keeps) or train.bn_buffers == "local" or train.keep_optimizer

    def personalises(self, train: TrainOptions) -> bool:
        """Whether each client ends with a model of its own."""
        return self.merge.personalises or train.bn_buffers == "local"

    def refuse(self, setting: Setting) -> str | None:
        """Why this composition cannot work, in a sentence; None if it can."""
        if self.needs_labels and setting.num_classes == 0:
            needy = next(part.name for part in self.parts if part.needs_labels)
            return f"{needy!r} is supervised and these images have no labels; choose a self-supervised method"
        if self.merge.alone and type(self.aggregation) is not FedAvg:
            return (
                f"with {self.merge.name!r} no weights leave a client, so {self.aggregation.name!r} would have none "
                "to fold; set method.aggregation = 'fedavg'"
            )
        if self.aggregation.serverless and type(self.server) is not Direct:
            return (
                f"{self.aggregation.name!r} knows no server, and {self.server.name!r} is a server's step; set "
                "method.server = 'direct'"
            )
        if self.aggregation.only_weights:
            for part in self.parts:
                if part.egress:
                    return (
                        f"{self.aggregation.name!r} covers weights only, and {part.name!r} sends more than that "
                        f"({'; '.join(part.egress)}); choose another method or aggregation"
                    )
                if hook := _undeclared(part):
                    return (
                        f"{self.aggregation.name!r} covers weights only, and {part.name!r} overrides {hook} "
                        "without saying in egress what it sends; declare it (egress = () if nothing leaves), or "
                        "choose another method or aggregation"
                    )
        for part in self.parts:
            if type(part).keep is not Part.keep and type(part).keeps is Part.keeps:
                return (
                    f"{part.name!r} overrides keep without saying in keeps what a client keeps, and nothing would "
                    "be kept; declare it (keeps = () if nothing is)"
                )
        return next((reason for part in self.parts if (reason := part.refuse(setting))), None)

    def refuse_networks(self, networks: nn.ModuleDict) -> str | None:
        """Why this composition cannot work with these networks, in a sentence; None if it can."""
        return next((reason for part in self.parts if (reason := part.refuse_networks(networks))), None)

    # The server's side.

    def prerequisites(self) -> dict[str, Prerequisite]:
        """The runs that the method needs first, by name."""
        return {name: run for part in self.parts for name, run in part.prerequisites().items()}

    def constants(self, setting: Setting, prerequisites: Mapping[str, Trained]) -> Tree:
        """What each client gets once."""
        made = {part.name: part.constants(setting, prerequisites) for part in self.parts}
        return {name: value for name, value in made.items() if value is not None}

    def init(self, setting: Setting, start: Weights) -> Tree:
        """The server's first state, from the one initial model."""
        slices = {part.name: part.init(setting) for part in self.parts}
        return {
            "models": self.aggregation.models(start, setting),
            "parts": {name: value for name, value in slices.items() if value is not None},
        }

    def send(
        self, state: Tree, setting: Setting, client: int, cohort: Sequence[int], round: int, kept: int = 0
    ) -> Tree:
        """All that a client gets in a round.

        Args:
            state: the server's.
            setting: of the run.
            client: id.
            cohort: in the order in which it was drawn.
            round: from 1.
            kept: the round after which the client kept what is still valid of its own; 0: none.
        """
        epochs = (part.epochs(setting, client, cohort, round) for part in self.parts)
        slices = {
            part.name: part.send(state["parts"].get(part.name), client, cohort, round) for part in self.parts
        }
        return {
            "round": round,
            "client": client,
            "epochs": next((e for e in epochs if e is not None), setting.train.epochs),
            "kept": kept,
            "models": {} if self.merge.alone and kept else self.aggregation.sent(state["models"], client),
            "parts": {name: value for name, value in slices.items() if value is not None},
        }

    def open(self, state: Tree, setting: Setting, round: int, scratch: Path | None = None) -> RoundFold:
        """Begin to fold a round's updates."""
        return RoundFold(self, state, setting, round, scratch)

    def deploy(self, state: Tree) -> Deployment:
        """The named models that result, and which client uses which."""
        return self.aggregation.deploy(state["models"], state)

    def personal(self, deployment: Deployment, client: int, own: Tree) -> Weights:
        """The model that a client uses: the one chosen for it, joined with what it keeps to itself."""
        own = own or {}
        shared: Weights = {}
        if deployment.models:
            first = next(iter(deployment.models))
            shared = deployment.models[deployment.choice.get(client, first)]
        mine = self.merge.personal(shared, own.get("parts", {}).get(self.merge.name))
        return {**mine, **own.get("buffers", {})}

    def refuse_update(self, update: Tree, setting: Setting) -> str | None:
        """What is wrong with the parts' slices of an update, in a sentence."""
        if self.aggregation.only_weights and update["parts"]:
            return (
                f"it holds more than weights ({', '.join(map(repr, update['parts']))}), and "
                f"{self.aggregation.name!r} covers those only"
            )
        for part in self.parts:
            reason = part.refuse_slice(update["parts"].get(part.name), setting, update["weights"])
            if reason:
                return reason
        return None


def _undeclared(part: Part) -> str | None:
    """The hook by which a part may send something that its ``egress`` says nothing of."""
    kind = type(part)
    if kind.egress is not Part.egress:
        return None
    if kind.finish is not Part.finish:
        return "finish"
    return "report" if isinstance(part, Aggregation) and type(part).report is not Aggregation.report else None


_STATISTICS = {
    "samples": "its number of samples",
    "batches": "its number of batches",
    "loss": "its mean loss in the last local epoch",
}


class RoundFold:
    """A round's fold: models by the aggregation, slices by their parts, then the server step."""

    def __init__(
        self, method: Method, state: Tree, setting: Setting, round: int, scratch: Path | None
    ) -> None:
        self._method = method
        self._state = state
        self._setting = setting
        self._models: Fold = method.aggregation.open(state["models"], setting, round, scratch)
        self._slices: dict[str, SliceFold] = {}
        for part in method.parts:
            fold = part.fold(state["parts"].get(part.name), setting, round)
            if fold is not None:
                self._slices[part.name] = fold

    def add(self, client: int, update: Tree) -> None:
        """Fold in one client's update; clients come in id order, and the update may be reused after."""
        self._models.add(client, update)
        for name, fold in self._slices.items():
            fold.add(client, update["parts"].get(name))

    def close(self) -> Tree:
        """The server's next state."""
        models = self._models.close()
        parts = dict(self._state["parts"])
        parts.update({name: fold.close() for name, fold in self._slices.items()})
        server = self._method.server
        steps = dict(parts.get(server.name) or {})
        for name, folded in models.items():
            current = self._state["models"][name]
            if folded is not current:  # a cluster that nobody chose takes no step
                steps[name], models[name] = server.step(steps.get(name), current, folded, self._setting)
        if any(value is not None for value in steps.values()):
            parts[server.name] = steps
        return {"models": models, "parts": parts}
