"""A method: four axes and a server step, composed; its server side and its client side.

The server's side is a set of pure functions of trees, the client's side an object that a worker reuses for one
client after the other. Engines call these and nothing else; neither side knows where it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atoll.aggregation.fedavg import FedAvg
from atoll.methods.merge import Replace
from atoll.methods.server import Direct
from atoll.parts import (
    Aggregation,
    Batch,
    ClientData,
    Deployment,
    Fold,
    Forward,
    Local,
    Merge,
    Objective,
    Part,
    Prerequisite,
    ServerStep,
    Setting,
    SliceFold,
    Term,
    Trained,
    run_forwards,
)
from atoll.rng import derive_seed
from atoll.training import TrainOptions, learning_rate, make_optimizer
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
        if self.aggregation.only_weights:
            for part in self.parts:
                if part.egress:
                    return (
                        f"{self.aggregation.name!r} covers weights only, and {part.name!r} sends more than that "
                        f"({'; '.join(part.egress)}); choose another method or aggregation"
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
            "models": {} if self.merge.alone and kept else state["models"],
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
        for part in self.parts:
            reason = part.refuse_slice(update["parts"].get(part.name), setting, update["weights"])
            if reason:
                return reason
        return None


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
            steps[name], models[name] = server.step(
                steps.get(name), self._state["models"][name], folded, self._setting
            )
        if any(value is not None for value in steps.values()):
            parts[server.name] = steps
        return {"models": models, "parts": parts}


class Client:
    """The client's side: one object, one set of networks and one optimiser for any number of clients in turn.

    Args:
        method: to run.
        setting: of the run.
        networks: made by `build_networks`; overwritten at every start.
        constants: as `Method.constants` made them.
    """

    def __init__(self, method: Method, setting: Setting, networks: nn.ModuleDict, constants: Tree) -> None:
        self.method = method
        self.setting = setting
        self.networks = networks
        self.constants = constants
        self.copies: dict[str, nn.ModuleDict] = {}
        self.optimizer = make_optimizer(setting.train, networks.parameters())
        self._buffers = buffer_names(networks)
        self._shared = frozenset(update_names(method, setting.train, networks))

    def start(self, message: Tree, own: Tree, data: ClientData) -> None:
        """Load what was sent and what was kept; ``own`` is None at the client's first time."""
        method, train = self.method, self.setting.train
        self.local = Local(
            self.setting, message["client"], message["round"], self.networks, self.copies,
            message, self.constants, own, data,
        )  # fmt: skip
        local = self.local
        local.lr = learning_rate(train, local.round)
        local.shared = self._shared
        self.networks.train()
        models = message["models"]
        local.received = method.aggregation.choose(local, models) if models else {}
        joined = method.merge.join(local, local.received)
        local.received = local.received or joined  # a client that trains alone was sent nothing
        self.networks.load_state_dict(joined)
        if train.bn_buffers == "local" and own:
            self.networks.load_state_dict(own["buffers"], strict=False)
        for group in self.optimizer.param_groups:
            group["lr"] = local.lr
        self.optimizer.state.clear()
        if train.keep_optimizer and own:
            self._load_optimizer(own["optimizer"])
        for part in method.parts:
            part.start(local)
        self._losses: dict[str, list[Tensor]] = {"loss": []}
        self._epoch_began = 0

    def step(self, batch: Batch) -> Tensor:
        """The local loss of a batch; every declared pass runs once."""
        method, local = self.method, self.local
        for part in method.parts:
            batch.images.update(part.inputs(local, batch))
        networks = {"local": self.networks, **self.copies}
        joint = self.setting.train.views_batch == "joint"
        passes = run_forwards(method.forwards, networks, batch.images, joint)
        total = torch.zeros((), device=local.device)
        for weight, part in method.losses:
            loss = part.loss(local, batch, passes)
            self._losses.setdefault(part.name, []).append(loss.detach())
            total = total + weight * loss if weight != 1 else total + loss
        self._losses["loss"].append(total.detach())
        return total

    def after_step(self) -> None:
        """After each optimiser step."""
        self.local.steps += 1
        for part in self.method.parts:
            part.after_step(self.local)

    def end_epoch(self) -> None:
        """Close a local epoch: its mean loss is what loss-weighted aggregation uploads."""
        steps = self._losses["loss"][self._epoch_began :]
        self.local.last_epoch_loss = float(torch.stack(steps).mean()) if steps else 0.0
        self._epoch_began += len(steps)

    def finish(self) -> tuple[Tree, Tree]:
        """The update, and what the client keeps (None where the method keeps nothing).

        The tensors of both may be the networks' own: use or copy them before the next `start`.
        """
        method, local, train = self.method, self.local, self.setting.train
        weights = {name: value.detach() for name, value in self.networks.state_dict().items()}
        statistics = {
            "samples": local.data.num_samples,
            "batches": local.data.num_batches(),
            "loss": local.last_epoch_loss,
        }
        slices = {part.name: part.finish(local) for part in method.parts}
        update = {
            "weights": {name: value for name, value in weights.items() if name in self._shared},
            "losses": {name: float(torch.stack(v).mean()) for name, v in self._losses.items() if v},
            "parts": {name: value for name, value in slices.items() if value is not None},
            **{name: statistics[name] for name in method.aggregation.statistics},
            **method.aggregation.report(local),
        }
        if not method.stateful(train):
            return update, None
        kept = {part.name: part.keep(local) for part in method.parts}
        own: dict[str, Any] = {"parts": {name: value for name, value in kept.items() if value is not None}}
        if train.bn_buffers == "local":
            own["buffers"] = {name: weights[name] for name in sorted(self._buffers)}
        if train.keep_optimizer:
            own["optimizer"] = {str(k): v for k, v in self.optimizer.state_dict()["state"].items()}
        return update, own

    def _load_optimizer(self, kept: Tree) -> None:
        groups = self.optimizer.state_dict()["param_groups"]
        state = {int(key): value for key, value in kept.items()}
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})


def train_client(
    client: Client, message: Tree, own: Tree, data: ClientData, progress: Callable[[int], None] | None = None
) -> tuple[Tree, Tree]:
    """One client's whole round: what every engine runs, wherever it runs it.

    Args:
        client: the reusable client side.
        message: from `Method.send`.
        own: what the client kept, or None.
        data: its samples.
        progress: called after each step with the images seen.

    Returns:
        The update and what the client keeps, valid until the client's next start.
    """
    train = client.setting.train
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(client.setting.seed, "networks", message["round"], message["client"]))
        client.start(message, own, data)
        device = client.local.device.type
        epoch = 0
        for batch in data.batches(message["round"], message["epochs"], client.method.images):
            if batch.epoch != epoch:
                client.end_epoch()
                epoch = batch.epoch
            with torch.autocast(device, enabled=train.amp and device == "cuda"):
                loss = client.step(batch)
            client.optimizer.zero_grad(set_to_none=True)
            torch.autograd.backward(loss)
            client.optimizer.step()
            client.after_step()
            if progress is not None:
                progress(len(batch.indices))
        client.end_epoch()
        return client.finish()


def update_names(method: Method, train: TrainOptions, networks: nn.ModuleDict) -> set[str]:
    """Names of the weights that an update holds: all but what the merge or the buffers' policy keeps back."""
    stays = method.merge.private(networks)
    if train.bn_buffers != "average":
        stays = stays | buffer_names(networks)
    return set(networks.state_dict()) - stays


def buffer_names(networks: nn.Module) -> set[str]:
    """Names of BatchNorm's running statistics, found by module type."""
    return {
        f"{prefix}.{name}"
        for prefix, module in networks.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        for name, _ in module.named_buffers(recurse=False)
    }
