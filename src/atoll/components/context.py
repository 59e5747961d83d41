"""What a client's components share during a round: networks, data, and a room of its own for each of them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Protocol

import torch
from torch import Tensor, nn

from atoll.components.forwards import Features
from atoll.components.messages import ClientState, Message, Slices
from atoll.components.setting import Setting
from atoll.core.rng import stream
from atoll.core.tree import Tree, Weights
from atoll.data.batch import ClientData


class Named(Protocol):
    """Whatever has a name."""

    @property
    def name(self) -> str:
        """In messages and states."""
        ...


class ClientContext:
    """One client during one round, as its components see it.

    Attributes:
        setting: of the run.
        client: id, from 0.
        round: from 1.
        networks: the networks under training; ``networks["encoder"]``, ``["projector"]`` and components' heads.
        after: what a component does to a head's output before any loss reads it, by the head's name, in all
            networks, until the round ends.
        received: the weights that were downloaded, before any merge; what never leaves a client is not among them,
            and a client that trains alone has none.
        shared: names of the weights that leave the client.
        reset: the client has no usable state of its own, and components start theirs from nothing.
        lr: learning rate of this round.
        steps: optimiser steps taken.
        last_epoch_loss: mean loss of the newest local epoch.
        data: the client's samples.
    """

    def __init__(
        self,
        setting: Setting,
        client: int,
        round: int,
        networks: nn.ModuleDict,
        copies: dict[str, nn.ModuleDict],
        message: Message,
        constants: Slices,
        retained: ClientState | None,
        data: ClientData,
    ) -> None:
        self.setting = setting
        self.client = client
        self.round = round
        self.networks = networks
        self.copies = copies
        self.after: dict[str, Callable[[Tensor], Tensor]] = {}
        self.data = data
        self.received: Weights = {}
        self.shared: frozenset[str] = frozenset()
        self.reset = retained is None
        self.lr = 0.0
        self.steps = 0
        self.last_epoch_loss = 0.0
        self._message = message
        self._constants = constants
        self._retained = retained if retained is not None else ClientState()
        self._scopes: dict[str, Scope] = {}

    def of(self, component: Named) -> Scope:
        """A component's own room: what the server sent it, what the client kept for it, and space to work."""
        name = component.name
        if name not in self._scopes:
            self._scopes[name] = Scope(
                message=self._message.get("parts", {}).get(name),
                constants=self._constants.get(name),
                retained=self._retained.get("parts", {}).get(name),
            )
        return self._scopes[name]

    def stream(self, purpose: str) -> torch.Generator:
        """A random stream of this client in this round."""
        return stream(self.setting.seed, purpose, self.round, self.client)

    def frozen(self, name: str, weights: Weights | None = None, train: bool = False) -> nn.ModuleDict:
        """A copy of the networks without gradients, to be named in a `Forward`; made once, reused after.

        Args:
            name: of the copy.
            weights: to load (names it lacks stay as they are now in `networks`); None: as `networks` are.
            train: BatchNorm uses the batch's statistics (momentum targets) instead of the running ones.
        """
        if name not in self.copies:
            self.copies[name] = copy.deepcopy(self.networks).requires_grad_(False)
        twin = self.copies[name]
        twin.load_state_dict({**self.networks.state_dict(), **(weights or {})})
        twin.train(train)
        return twin

    @torch.no_grad()
    def outputs(self, network: nn.ModuleDict, *heads: str) -> list[Tensor]:
        """What a network makes of each of the client's samples: in order, without augmentation, in eval mode.

        Args:
            network: `networks`, or what `frozen` gave.
            heads: names of attributes of `Features`: ``"h"``, ``"z"`` or ``"q"``.

        Returns:
            For each head an (n_k, d) tensor on the training device; the network's mode is as it was.
        """
        training = network.training
        network.eval()
        passes = [
            Features(network, network["encoder"](batch.images["image"]), self.after)
            for batch in self.data.ordered()
        ]
        made = [torch.cat([getattr(features, head) for features in passes]) for head in heads]
        network.train(training)
        return made

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
        """Where the networks live."""
        return next(self.networks.parameters()).device


class Scope(SimpleNamespace):
    """A component's room in a `ClientContext`, with whatever the component stores in it.

    Attributes:
        message: the component's slice of the message.
        constants: its slice of what every client got once.
        retained: its slice of what the client kept; None: nothing.
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
    warnings.warn(message, DeprecationWarning, stacklevel=3)
