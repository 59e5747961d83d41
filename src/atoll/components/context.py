"""What a client's components share while it trains: the setting, batches, forward passes and room of their own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from atoll.components.training import TrainOptions
from atoll.core.rng import derive_seed, stream
from atoll.core.tree import Tree, Weights
from atoll.data.batch import ClientData
from atoll.models import ModelOptions

if TYPE_CHECKING:
    from atoll.components.base import Component


@dataclass(frozen=True)
class Setting:
    """What server and clients know of a run from its recipe.

    Attributes:
        seed: the run's seed.
        num_clients: K.
        image_shape: (C, H, W) of a view.
        num_classes: of the labels; 0 where there are none.
        encoder_dim: size of a representation h.
        embedding_dim: size of an embedding z.
        train: how clients train.
        model: the recipe's model section, for components that build heads of their own.
        sizes: samples at each client, where the server may know them.
        buffers: names of the weights that no gradient trains, such as BatchNorm's running statistics.
        stays: names of the weights that never leave a client.
        personal: whether clients keep weights of their own, so that each ends with a model of its own.
        draw: which of the independent initial models is being built; 0 is the one that all share.
        checkpoint_every: rounds between checkpoints, which a kill may have run again.
        fresh: draws further initial models, independent of the one that all share: the first, the second, …
            It is there wherever networks can be built, and None in a setting that was made by hand.
    """

    seed: int
    num_clients: int
    image_shape: tuple[int, int, int]
    num_classes: int
    encoder_dim: int
    embedding_dim: int
    train: TrainOptions
    model: ModelOptions
    sizes: tuple[int, ...] = ()
    buffers: frozenset[str] = frozenset()
    stays: frozenset[str] = frozenset()
    personal: bool = False
    draw: int = 0
    checkpoint_every: int = 1
    fresh: Callable[[int], Weights] | None = None


@dataclass(frozen=True)
class Forward:
    """One forward pass that a component needs.

    Attributes:
        images: ``"view1"``, ``"view2"``, ``"view3"`` (augmented), ``"image"`` (as it is), ``"other"`` (a view of
            another, random image of the client), or a name that the part's own `Component.inputs` provides.
        network: ``"local"`` (trained), or the name of a copy that a component made with `Local.frozen`.
    """

    images: str
    network: str = "local"


# What becomes of a head's output before any loss reads it, by the head's name.
After = Mapping[str, Callable[[Tensor], Tensor]]


class Features:
    """What networks make of some images: the representation h, and on demand what the heads make of it.

    A head runs once, when a component first asks for it, and its output is kept for the components that follow.
    """

    def __init__(self, networks: nn.ModuleDict, h: Tensor, after: After) -> None:
        self._networks = networks
        self._outputs: dict[str, Tensor] = {"h": h}
        self._after = after

    @property
    def h(self) -> Tensor:
        """The representation f(x), (N, d_h)."""
        return self.head("h")

    @property
    def z(self) -> Tensor:
        """The embedding g(h), (N, d)."""
        return self.head("projector", of="h")

    @property
    def q(self) -> Tensor:
        """The prediction of the embedding, (N, d)."""
        return self.head("predictor", of="projector")

    def head(self, name: str, of: str = "h") -> Tensor:
        """What the head ``name`` makes of the output ``of`` (``"h"`` or another head's name)."""
        if name not in self._outputs:
            output = self._networks[name](self.head(of))
            self._outputs[name] = self._after[name](output) if name in self._after else output
        return self._outputs[name]


class _Rows(Features):
    """One view of a joint batch: every output is computed for both views at once, then cut."""

    def __init__(self, both: Features, rows: slice) -> None:
        self._both = both
        self._rows = rows

    def head(self, name: str, of: str = "h") -> Tensor:
        return self._both.head(name, of)[self._rows]


Passes = dict[Forward, Features]


def run_forwards(
    forwards: Sequence[Forward],
    networks: Mapping[str, nn.ModuleDict],
    images: Mapping[str, Tensor],
    joint: bool,
    after: After,
) -> Passes:
    """Run each declared pass once, in order; with ``joint``, a network's two views in one batch."""
    passes: Passes = {}
    for forward in forwards:
        if forward in passes:
            continue
        network = networks[forward.network]
        pair = [Forward(name, forward.network) for name in ("view1", "view2")]
        with torch.set_grad_enabled(forward.network == "local"):
            if joint and forward in pair and all(one in forwards for one in pair):
                stacked = torch.cat([images["view1"], images["view2"]])
                both = Features(network, network["encoder"](stacked), after)
                rows = len(stacked) // 2
                passes[pair[0]] = _Rows(both, slice(0, rows))
                passes[pair[1]] = _Rows(both, slice(rows, None))
            else:
                passes[forward] = Features(network, network["encoder"](images[forward.images]), after)
    return passes


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
        fresh: the client has no usable past of its own: components start their state anew.
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
        message: Tree,
        constants: Tree,
        retained: Tree,
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
        self.fresh = retained is None
        self.lr = 0.0
        self.steps = 0
        self.last_epoch_loss = 0.0
        self._message = message
        self._constants = constants
        self._own = retained or {}
        self._scopes: dict[str, Scope] = {}

    def of(self, component: Component) -> Scope:
        """A part's own corner: what the server sent it, what the client kept for it, and room to work."""
        name = component.name
        if name not in self._scopes:
            self._scopes[name] = Scope(
                message=self._message.get("parts", {}).get(name),
                constants=self._constants.get(name),
                retained=self._own.get("parts", {}).get(name),
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
    def device(self) -> torch.device:
        """Where the networks live."""
        return next(self.networks.parameters()).device


class Scope(SimpleNamespace):
    """A part's corner of a `Local`: ``message``, ``constants``, ``own``, and whatever it stores in it."""

    message: Any
    constants: Any
    retained: Any

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the component stored no {name!r} in its start()")


def seeded(module_seed: int, build: Any) -> Any:
    """Build a module with its own random stream, leaving the global one as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(module_seed)
        return build()


def init_seed(seed: int, name: str, draw: int = 0) -> int:
    """The seed of a network's first weights: a head more or less does not change the others'.

    ``draw`` counts independent initialisations; 0 is the one that all share.
    """
    return derive_seed(seed, "init", name, *([draw] if draw else []))
