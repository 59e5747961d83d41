"""State that a client's components share during a round: networks, data, and a scope for each component."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Protocol

import torch
from torch import Tensor, nn

from atoll.components.forwards import Features
from atoll.components.messages import ClientState, Message, Slices
from atoll.components.setting import Setting
from atoll.core.devices import upload
from atoll.core.errors import OldCodeWarning, warn
from atoll.core.rng import stream
from atoll.core.tree import Tree, Weights
from atoll.data.batch import ClientData
from atoll.models.norms import evaluating, modes, set_modes


class Named(Protocol):
    """An object with a name."""

    @property
    def name(self) -> str:
        """Name in messages and states."""
        ...


class ClientContext:
    """One client during one round, as its components see it.

    Attributes:
        setting: Setting of the run.
        client: The client's id, from 0.
        round: The round, from 1.
        networks: The networks under training: ``networks["encoder"]``, ``["projector"]`` and the components' heads.
        copies: Frozen copies of the networks that this client has made in this round, by name (see `frozen`).
        after: Functions that are applied to a head's output before any loss reads it, by the head's name (see
            `Component.after_heads`); they apply to all networks until the round ends.
        received: The downloaded weights, before any merge; without the local-only weights, and empty for a client
            that trains alone.
        shared: Names of the weights that leave the client.
        fixed: Names of the weights that do not train. Every client has them, so a client state need not contain
            them.
        reset: Whether the client has no usable retained state, so that components initialise theirs.
        lr: Learning rate of this round.
        steps: Number of optimiser steps taken.
        last_epoch_loss: Mean loss of the last completed local epoch.
        data: The client's samples.
        host: Function that replaces the upload in `from_host` while a step is recorded; None otherwise.
    """

    def __init__(
        self,
        setting: Setting,
        client: int,
        round: int,
        networks: nn.ModuleDict,
        pool: dict[str, nn.ModuleDict],
        message: Message,
        constants: Slices,
        retained: ClientState | None,
        data: ClientData,
    ) -> None:
        self.setting = setting
        self.client = client
        self.round = round
        self.networks = networks
        self.copies: dict[str, nn.ModuleDict] = {}
        self.after: dict[str, Callable[[Tensor], Tensor]] = {}
        self.data = data
        self.received: Weights = {}
        self.shared: frozenset[str] = frozenset()
        self.fixed: frozenset[str] = frozenset()
        self.reset = retained is None
        self.lr = 0.0
        self.steps = 0
        self.last_epoch_loss = 0.0
        self._pool = pool  # copies made by earlier clients and rounds, whose memory is reused
        self._message = message
        self._constants = constants
        self._retained = retained if retained is not None else ClientState()
        self._scopes: dict[str, Scope] = {}
        self.host: Callable[[Callable[[], Tensor], torch.device], Tensor] | None = None

    def of(self, component: Named) -> Scope:
        """Return a component's scope: its message, constants and retained state, and attributes that it stores."""
        name = component.name
        if name not in self._scopes:
            self._scopes[name] = Scope(
                message=self._message.get("parts", {}).get(name),
                constants=self._constants.get(name),
                retained=self._retained.get("parts", {}).get(name),
            )
        return self._scopes[name]

    def retained(self, component: Named) -> Tree:
        """Return a component's retained client state; None if there is none, or if the merge reset the client."""
        return None if self.reset else self.of(component).retained

    def stream(self, purpose: str) -> torch.Generator:
        """Open a random stream of this client in this round."""
        return stream(self.setting.seed, purpose, self.round, self.client)

    def from_host(self, make: Callable[[], Tensor]) -> Tensor:
        """Upload what each step makes on the CPU: random draws, or what depends on the batch's indices.

        A step that is recorded and replayed (``train.cuda_graphs``) calls ``make`` again at each replay.

        Args:
            make: Function that makes the tensor.

        Returns:
            The tensor, on the device of the networks.
        """
        return upload(make(), self.device) if self.host is None else self.host(make, self.device)

    def frozen(self, name: str, weights: Weights | None = None, train: bool = False) -> nn.ModuleDict:
        """Load weights into a copy of the networks without gradients, which a `Forward` can name.

        The copy belongs to this client until the round ends; later calls with the same name reuse its memory.

        Args:
            name: Name of the copy.
            weights: Weights to load; missing names take their current values in `networks`. None loads all weights
                of `networks`.
            train: Give each layer of the copy the mode of the same layer in `networks`, so that BatchNorm uses the
                batch's statistics (momentum targets) unless it is frozen. Otherwise, the copy is in eval mode.
        """
        if name not in self._pool:
            self._pool[name] = copy.deepcopy(self.networks).requires_grad_(False)
        twin = self.copies[name] = self._pool[name]
        twin.load_state_dict({**self.networks.state_dict(), **(weights or {})})
        twin.eval()
        if train:
            set_modes(twin, modes(self.networks))
        return twin

    @torch.no_grad()
    def outputs(
        self, network: nn.ModuleDict, *heads: str, augment: torch.Generator | None = None
    ) -> list[Tensor]:
        """Compute a network's outputs for all samples of the client, in order, in eval mode.

        Afterwards, each layer has its previous mode again.

        Args:
            network: `networks`, or a result of `frozen`.
            heads: Names of attributes of `Features`: ``"h"``, ``"z"`` or ``"q"``.
            augment: Source of the random draws of one augmented view; None for images without augmentation.

        Returns:
            For each head an (n_k, d) tensor on the training device.
        """
        with evaluating(network):
            passes = [
                Features(network, network["encoder"](batch.images["image"]), self.after)
                for batch in self.data.ordered(augment)
            ]
            return [torch.cat([getattr(features, head) for features in passes]) for head in heads]

    @property
    def fresh(self) -> bool:
        """Deprecated: `reset`."""
        _warn_renamed("ClientContext.fresh", "ClientContext.reset")
        return self.reset

    @fresh.setter
    def fresh(self, reset: bool) -> None:
        _warn_renamed("ClientContext.fresh", "ClientContext.reset")
        self.reset = reset

    @property
    def device(self) -> torch.device:
        """Device of the networks."""
        return next(self.networks.parameters()).device


class Scope(SimpleNamespace):
    """A component's scope in a `ClientContext`; the component may store further attributes in it.

    Attributes:
        message: The component's slice of the message.
        constants: The component's slice of the constants, which each client receives once.
        retained: The component's slice of the retained client state, even if the merge reset the client (see
            `ClientContext.retained`); None if there is none.
    """

    message: Tree
    constants: Tree
    retained: Tree

    def __getattr__(self, name: str) -> Tree:
        if name == "own":
            _warn_renamed("context.of(self).own", "context.of(self).retained")
            return self.retained
        raise AttributeError(f"the component stored no {name!r} in its start()")


def _warn_renamed(old: str, new: str) -> None:
    message = f"{old} is now {new}; the old name will be removed in 0.3"
    warn(message, OldCodeWarning)
