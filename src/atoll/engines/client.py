"""Client side of a method: an object that clients share in turn, and a client's complete round."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import Tensor, nn

from atoll.components.base import Batch, ClientContext, ClientData, Forward, Passes, Setting, run_forwards
from atoll.components.messages import ClientState, Message, Slices, Update
from atoll.components.results import returned
from atoll.components.training import learning_rate, make_optimizer
from atoll.core.errors import UserError, did_you_mean
from atoll.core.process_state import seeded_streams
from atoll.core.rng import derive_seed
from atoll.core.text import type_words
from atoll.core.tree import Weights, checked, clone
from atoll.data.batch import part_sizes
from atoll.data.client_data import VIEW_NAMES
from atoll.engines.network_state import NetworkState
from atoll.engines.step_graphs import step_graph
from atoll.engines.weight_names import buffer_names, frozen_names, personal_names, update_names
from atoll.methods.method import Method
from atoll.models.compiled import CompiledEncoders
from atoll.models.gradient_checkpointing import checkpointed
from atoll.models.norms import train_mode

BASE = "base"  # name of the constant with the weights that are sent only once


class Client:
    """Client side of a method: one set of networks and one optimiser for any number of clients in turn.

    Args:
        method: The method.
        setting: The run's setting.
        networks: Networks of the federation; every `start` overwrites their weights.
        constants: Result of `Method.constants`.
    """

    def __init__(self, method: Method, setting: Setting, networks: nn.ModuleDict, constants: Slices) -> None:
        self.method = method
        self.setting = setting
        self.networks = networks
        self.constants = constants
        self.copies: dict[str, nn.ModuleDict] = {}
        self.joint = setting.train.views_batch == "joint"
        self.optimizer = make_optimizer(setting.train, networks.parameters())
        self._buffers = buffer_names(networks)
        self._shared = frozenset(update_names(method, setting.train, networks))
        self._personal = personal_names(method, networks)
        self._trained = [(weight, weight.requires_grad) for weight in networks.parameters()]
        self._fixed = frozenset(frozen_names(networks))
        self._state = NetworkState(networks)
        train = setting.train
        self.graph = step_graph(method, train, self.device)
        self._compiled: CompiledEncoders | None = None
        if train.compile:
            sizes = part_sizes(train.batch_size, train.accumulate)
            graphs = train.cuda_graphs and self.graph is None
            self._compiled = CompiledEncoders(set(sizes), self.device, graphs)
        self._base: Weights = constants.get(BASE, {})
        self._state.load(self._base)

    @property
    def device(self) -> torch.device:
        """Device of the networks."""
        return next(self.networks.parameters()).device

    @property
    def networks_by_name(self) -> dict[str, nn.ModuleDict]:
        """The networks by the names that declared passes give them: ``"local"``, and those of the copies."""
        return {"local": self.networks, **self.context.copies}

    def autocast(self) -> torch.autocast:
        """Context of a step's forward passes and losses, in the precision that the recipe sets."""
        # bfloat16 has float32's range, so gradients need no scaling, as float16's would
        kind = self.device.type
        return torch.autocast(kind, torch.bfloat16, enabled=self.setting.train.amp and kind == "cuda")

    def start(self, message: Message, retained: ClientState | None, data: ClientData) -> None:
        """Load the message and the client state; ``retained`` is None the first time that a client takes part.

        Components get copies of their slices of the message, and the merge gets a copy of the model, so that they
        may change these: within a process, other clients' messages and the server share the message's tensors.
        """
        method, train = self.method, self.setting.train
        message = {**message, "parts": clone(message["parts"])}
        self.context = ClientContext(
            self.setting, message["client"], message["round"], self.networks, self.copies,
            message, self.constants, retained, data,
        )  # fmt: skip
        context = self.context
        context.lr = learning_rate(train, context.round)
        context.shared, context.fixed = self._shared, self._fixed
        train_mode(self.networks)
        for weight, trained in self._trained:
            weight.requires_grad_(trained)  # a component may have frozen it, for another client
        models = message["models"]
        downloaded = method.aggregation.choose(context, models) if models else {}
        # Weights that no client sends have their initial values on the server, which are not a model of the others.
        context.received = {name: weight for name, weight in downloaded.items() if name in self._shared}
        if downloaded:
            own = downloaded if method.merge.replaces else clone(downloaded)
            downloaded = {**self._base, **own}
        if not method.merge.replaces:
            downloaded = method.merge.join(context, downloaded)
        self._state.load(downloaded, whole=True)
        if retained:
            self._state.load(retained.get("personal", {}))
        if train.bn_buffers == "local" and retained:
            self._state.load(retained["buffers"])
        for group in self.optimizer.param_groups:
            group["lr"] = context.lr
        self.optimizer.state.clear()
        if train.keep_optimizer and retained:
            self._load_optimizer(retained["optimizer"])
        for component in method.components:
            changed = component.after_heads(context)
            context.after.update(
                returned(component, "after_heads", changed, Mapping, "a dict of functions by head")
            )
        for component in method.components:
            component.start(context)
        self._losses: dict[str, list[Tensor]] = {"loss": []}
        self._shares: list[float] = []  # of their batches
        self._epoch = self._epoch_start = 0
        if self.graph is not None:
            self.graph.start(message["epochs"] * data.num_batches())

    def begin_batch(self, batch: Batch) -> None:
        """Begin a step; if the batch is the first of a local epoch, end the previous epoch."""
        torch.clear_autocast_cache()  # within a caller's autocast, it would keep the last step's weights
        if self._compiled is not None:
            self._compiled.begin_step()
        if batch.epoch != self._epoch:
            self._end_epoch()
            self._epoch = batch.epoch

    def step(self, batch: Batch, share: float = 1.0) -> Tensor:
        """Compute the local loss of a batch; every declared forward pass runs once.

        Args:
            batch: The batch, or a part of one.
            share: The part's share of the batch, by which its loss is weighted in the reported means.

        Raises:
            UserError: The loss of a component is not a real scalar.
        """
        self.prepare(batch)
        return self.loss(batch, self.passes(batch), share)

    def passes(self, batch: Batch) -> Passes:
        """Run every declared forward pass of a batch once."""
        encode = self._compiled or nn.Module.__call__
        return run_forwards(
            self.method.forwards, self.networks_by_name, batch.images, self.joint, self.context.after, encode
        )

    def prepare(self, batch: Batch) -> None:
        """Add the components' images to a batch.

        Raises:
            UserError: A component declares a pass with images or a network that do not exist.
        """
        context = self.context
        for component in self.method.components:
            made = component.inputs(context, batch)
            batch.images.update(returned(component, "inputs", made, Mapping, "a dict of images by name"))
        for forward in self.method.forwards:
            if forward.images not in batch.images:
                known = {*VIEW_NAMES, "image", "other", *batch.images}
                raise UserError(
                    f"{self._declarer(forward)!r} declares a pass of the images {forward.images!r}, which no "
                    f"inputs() returns; {did_you_mean(forward.images, known)}"
                )
            if forward.network not in ("local", *context.copies):
                raise UserError(
                    f"{self._declarer(forward)!r} declares a pass through the network {forward.network!r}, of "
                    f"which client {context.client} has made no copy in round {context.round}; call "
                    f"context.frozen({forward.network!r}) in start, for each client in each round"
                )

    def _declarer(self, forward: Forward) -> str:
        return next(component.name for component in self.method.components if forward in component.forwards())

    def loss(self, batch: Batch, passes: Passes, share: float = 1.0) -> Tensor:
        """Compute the local loss of a batch, given its forward passes; see `step`.

        Raises:
            UserError: The loss of a component is not a real scalar.
        """
        total, values = self.losses(batch, passes)
        self.note(values, share)
        return total

    def losses(self, batch: Batch, passes: Passes) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the local loss of a batch, and without gradients all losses by name; see `step`.

        Raises:
            UserError: The loss of a component is not a real scalar.
        """
        context = self.context
        total, values = torch.zeros((), device=context.device), {}
        for weight, component in self.method.losses:
            name, loss = component.name, component.loss(context, batch, passes)
            if not isinstance(loss, Tensor):
                raise UserError(f"the loss of {name!r} is {type_words(loss)}; return a tensor of torch's")
            if loss.dim():
                raise UserError(
                    f"the loss of {name!r} has shape {tuple(loss.shape)} and must be a scalar; return its mean"
                )
            if loss.is_complex():
                raise UserError(f"the loss of {name!r} is complex and must be real; return its abs()")
            values[name] = loss.detach()
            total = total + weight * loss if weight != 1 else total + loss
        return total, {**values, "loss": total.detach()}

    def note(self, values: Mapping[str, Tensor], share: float = 1.0) -> None:
        """Keep the losses of a batch, or of a part of one, for the reported means."""
        for name, value in values.items():
            # For a whole batch, this saves a kernel on a GPU.
            self._losses.setdefault(name, []).append(value if share == 1 else share * value)
        self._shares.append(share)

    def replay(self, batch: Batch) -> bool:
        """Take a complete step by a replay of its recorded kernels; False if there is none for this batch."""
        return self.graph is not None and self.graph.take(self, batch)

    def after_step(self) -> None:
        """Call the components after an optimiser step."""
        self.context.steps += 1
        for component in self.method.components:
            component.after_step(self.context)

    def _end_epoch(self) -> None:
        """End a local epoch and store its mean loss, which loss-weighted aggregation uploads."""
        self.context.last_epoch_loss = self._mean_loss("loss", self._epoch_start)
        self._epoch_start = len(self._shares)

    def _mean_loss(self, name: str, start: int = 0) -> float:
        """Mean of a loss over the batches from an index on; 0 if there are none."""
        losses, batches = self._losses[name][start:], sum(self._shares[start:])
        return float(torch.stack(losses).sum() / batches) if losses else 0.0

    def finish(self) -> tuple[Update, ClientState | None]:
        """End the last epoch; return the update and the client state, which is None if the method retains nothing.

        Both may share tensors with the networks: use or copy them before the next `start`.
        """
        self._end_epoch()
        self._state.notice_unsaved()
        method, context, train = self.method, self.context, self.setting.train
        weights = self._state.weights()
        sent = {component.name: component.finish(context) for component in method.components}
        slices = checked(sent, "finish")
        update: Update = {
            "weights": {name: value for name, value in weights.items() if name in self._shared},
            "losses": {name: self._mean_loss(name) for name, losses in self._losses.items() if losses},
            "parts": {name: value for name, value in slices.items() if value is not None},
        }
        if "samples" in method.aggregation.statistics:
            update["samples"] = context.data.num_samples
        if "batches" in method.aggregation.statistics:
            update["batches"] = context.data.num_batches()
        if "loss" in method.aggregation.statistics:
            update["loss"] = context.last_epoch_loss
        report = checked({method.aggregation.name: method.aggregation.report(context)}, "report")
        update = cast(Update, {**update, **report[method.aggregation.name]})  # further keys
        if not method.stateful(train):
            return update, None
        states = checked({part.name: part.keep(context) for part in method.components}, "keep")
        retained: ClientState = {
            "parts": {name: value for name, value in states.items() if value is not None}
        }
        if train.bn_buffers == "local":
            retained["buffers"] = {name: weights[name] for name in sorted(self._buffers)}
        if self._personal:
            retained["personal"] = {name: weights[name] for name in sorted(self._personal)}
        if train.keep_optimizer:
            retained["optimizer"] = {str(k): v for k, v in self.optimizer.state_dict()["state"].items()}
        return update, retained

    def _load_optimizer(self, retained: Slices) -> None:
        groups = self.optimizer.state_dict()["param_groups"]
        state = {int(key): value for key, value in retained.items()}
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        for weight, own in self.optimizer.state.items():
            for name, value in own.items():
                # A GPU's kernels require the weight's memory layout.
                if value.shape == weight.shape and value.stride() != weight.stride():
                    own[name] = torch.empty_like(weight, dtype=value.dtype).copy_(value)


def train_client(
    client: Client,
    message: Message,
    retained: ClientState | None,
    data: ClientData,
    progress: Callable[[int], None] | None = None,
    before_step: Callable[[nn.Module], None] | None = None,
) -> tuple[Update, ClientState | None]:
    """Run one client's complete round; all engines use this function.

    Args:
        client: The reusable client side.
        message: Result of `Method.send`.
        retained: The client state, or None.
        data: The client's samples.
        progress: Called after each step with the number of images in the batch.
        before_step: Called with the networks before each step of the optimiser, to change their gradients.

    Returns:
        The update and the client state, valid until the next `Client.start`.
    """
    train = client.setting.train
    with seeded_streams(training_seed(client.setting, message)):
        client.start(message, retained, data)
        with checkpointed(client.networks["encoder"], train.checkpoint_gradients):
            for batch in data.batches(message["round"], message["epochs"], client.method.images):
                train_batch(client, batch, before_step)
                if progress is not None:
                    progress(len(batch.indices))
        return client.finish()


def train_batch(client: Client, batch: Batch, before_step: Callable[[nn.Module], None] | None = None) -> None:
    """Take one step of a client on a batch; see `train_client`."""
    client.begin_batch(batch)
    if before_step is None and client.replay(batch):
        return
    client.optimizer.zero_grad(set_to_none=True)
    for part, share in batch.parts(client.setting.train.accumulate):
        with client.autocast():
            loss = client.step(part, share)
        if loss.requires_grad:
            torch.autograd.backward(loss if share == 1 else share * loss)
    if before_step is not None:
        before_step(client.networks)
    client.optimizer.step()
    client.after_step()


def training_seed(setting: Setting, message: Message) -> int:
    """Seed of the random streams while a client trains: random layers and the user's code draw from them."""
    return derive_seed(setting.seed, "networks", message["round"], message["client"])
