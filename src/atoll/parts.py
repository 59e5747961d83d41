"""The contract's small change: what a method is made of, and what a client's parts share while it trains.

A method composes an objective, terms, a merge, an aggregation and a server step (see `atoll.methods`). Each is
a `Part`: a frozen dataclass whose fields are its options in a recipe, with hooks for both sides. Parts never
know which engine runs them, and every hook has a default that does nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from atoll.data.images import Pixels
from atoll.errors import UserError
from atoll.models import ModelOptions
from atoll.rng import derive_seed, stream
from atoll.training import TrainOptions
from atoll.tree import Tree, Weights


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
        model: the recipe's model section, for parts that build heads of their own.
        sizes: samples at each client, where the server may know them.
        buffers: names of the weights that no gradient trains, such as BatchNorm's running statistics.
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
    fresh: Callable[[int], Weights] | None = None


@dataclass(frozen=True)
class Forward:
    """One forward pass that a part needs.

    Attributes:
        images: ``"view1"``, ``"view2"`` (augmented), ``"image"`` (as it is), ``"other"`` (a view of another,
            random image of the client), or a name that the part's own `Part.inputs` provides.
        network: ``"local"`` (trained), or the name of a copy that a part made with `Local.frozen`.
    """

    images: str
    network: str = "local"


@dataclass
class Batch:
    """Some of a client's samples.

    Attributes:
        indices: (N,) positions among the client's samples, int64, on the CPU.
        images: float images by name, each (N, C, H, W).
        labels: (N,) int64 on the training device, or None.
        epoch: local epoch, from 0.
    """

    indices: Tensor
    images: dict[str, Tensor]
    labels: Tensor | None
    epoch: int = 0


class ClientData(Protocol):
    """What a client may ask of its own data (see `atoll.data.client`)."""

    num_samples: int

    @property
    def labels(self) -> Tensor | None:
        """(N,) int64 labels of the client's samples, on the CPU; None where there are none."""
        ...

    def pick(self, rows: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Images of chosen samples: augmented with draws from ``generator``, or as they are without one."""
        ...

    def batches(self, round: int, epochs: int, images: Sequence[str]) -> Iterator[Batch]:
        """Shuffled training batches with the named images."""
        ...

    def ordered(self) -> Iterator[Batch]:
        """Every sample once, in order and without augmentation, as ``images["image"]``."""
        ...

    def num_batches(self) -> int:
        """Batches in one epoch."""
        ...

    def plain(self, pixels: Tensor) -> Tensor:
        """Other uint8 images as the networks see them: without augmentation, on the training device."""
        ...


class Features:
    """What networks make of some images: the representation h, and on demand what the heads make of it.

    A head runs once, when a part first asks for it, and its output is kept for the parts that follow.
    """

    def __init__(self, networks: nn.ModuleDict, h: Tensor) -> None:
        self._networks = networks
        self._outputs: dict[str, Tensor] = {"h": h}

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
            self._outputs[name] = self._networks[name](self.head(of))
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
    forwards: Sequence[Forward], networks: dict[str, nn.ModuleDict], images: dict[str, Tensor], joint: bool
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
                both = Features(network, network["encoder"](stacked))
                rows = len(stacked) // 2
                passes[pair[0]] = _Rows(both, slice(0, rows))
                passes[pair[1]] = _Rows(both, slice(rows, None))
            else:
                passes[forward] = Features(network, network["encoder"](images[forward.images]))
    return passes


class Local:
    """One client during one round, as its parts see it.

    Attributes:
        setting: of the run.
        client: id, from 0.
        round: from 1.
        networks: the networks under training; ``networks["encoder"]``, ``["projector"]`` and parts' heads.
        received: the weights that the client started from, before any merge (as they were downloaded).
        shared: names of the weights that leave the client.
        fresh: the client has no usable past of its own: parts start their state anew.
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
        own: Tree,
        data: ClientData,
    ) -> None:
        self.setting = setting
        self.client = client
        self.round = round
        self.networks = networks
        self.copies = copies
        self.data = data
        self.received: Weights = {}
        self.shared: frozenset[str] = frozenset()
        self.fresh = own is None
        self.lr = 0.0
        self.steps = 0
        self.last_epoch_loss = 0.0
        self._message = message
        self._constants = constants
        self._own = own or {}
        self._scopes: dict[str, Scope] = {}

    def of(self, part: Part) -> Scope:
        """A part's own corner: what the server sent it, what the client kept for it, and room to work."""
        name = part.name
        if name not in self._scopes:
            self._scopes[name] = Scope(
                message=self._message.get("parts", {}).get(name),
                constants=self._constants.get(name),
                own=self._own.get("parts", {}).get(name),
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
            Features(network, network["encoder"](batch.images["image"])) for batch in self.data.ordered()
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
    own: Any

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the part stored no {name!r} in its start()")


@dataclass(frozen=True)
class Prerequisite:
    """A run that a part needs first: centralised, resumable, in the run's own folder.

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
class Part:
    """A piece of a method; its dataclass fields are its options in a recipe.

    Class attributes:
        name: in recipes, states and messages.
        source: paper and equation.
        needs_labels: the part reads ``batch.labels``.
    """

    name: ClassVar[str] = ""
    source: ClassVar[str] = ""
    needs_labels: ClassVar[bool] = False

    # What depends on no option may be a class variable in a part, as most are.

    @property
    def egress(self) -> tuple[str, ...]:
        """What leaves a client because of this part, beyond weights, in words."""
        return ()

    @property
    def keeps(self) -> tuple[str, ...]:
        """What a client keeps for this part from round to round, in words."""
        return ()

    def refuse(self, setting: Setting) -> str | None:
        """A sentence that says why this part cannot work in this setting, or None."""
        return None

    def refuse_networks(self, networks: nn.ModuleDict) -> str | None:
        """A sentence that says why this part cannot work with these networks, or None."""
        return None

    def heads(self, setting: Setting) -> dict[str, nn.Module]:
        """Networks that this part adds; they train and travel like the encoder."""
        return {}

    def embeds(self) -> bool:
        """Whether this part reads embeddings; where no part does, there is no projector."""
        return False

    # The server's side.

    def prerequisites(self) -> dict[str, Prerequisite]:
        """Runs that this part needs first, by name."""
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
        """Local epochs of a client in a round, where the part decides on them; 0: no training."""
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

    def start(self, local: Local) -> None:
        """Before the first step."""

    def images(self) -> Sequence[str]:
        """Images of a batch that `inputs` or `loss` reads without a declared pass, by name."""
        return ()

    def inputs(self, local: Local, batch: Batch) -> dict[str, Tensor]:
        """Further images of a batch, by name."""
        return {}

    def after_step(self, local: Local) -> None:
        """After each optimiser step: momentum targets, queues."""

    def finish(self, local: Local) -> Tree:
        """The part's slice of the update."""
        return None

    def keep(self, local: Local) -> Tree:
        """What the client keeps for this part until its next round."""
        return None


def require_positive(part: Part, *options: str) -> None:
    """Check some of a part's options.

    Raises:
        UserError: one of them is not above 0.
    """
    for option in options:
        value = getattr(part, option)
        if not value > 0:
            raise UserError(f"options.{part.name}.{option} is {value}; it must be above 0")


class SliceFold(Protocol):
    """Takes slices one at a time, in client-id order."""

    def add(self, client: int, piece: Tree) -> None:
        """Fold in one client's slice."""
        ...

    def close(self) -> Tree:
        """The next slice of server state."""
        ...


@dataclass(frozen=True)
class Objective(Part):
    """The local loss."""

    def classifier(self) -> tuple[str, ...] | None:
        """The networks that make class logits of images, if the objective trains a classifier."""
        return None

    def embeds(self) -> bool:
        """Most self-supervised losses do."""
        return True

    def loss(self, local: Local, batch: Batch, passes: Passes) -> Tensor:
        """A scalar tensor to minimise."""
        raise NotImplementedError


@dataclass(frozen=True)
class Term(Part):
    """A loss that is added to the objective, times ``weight``; with weight 0 it is left out entirely."""

    weight: float = 1.0

    def embeds(self) -> bool:
        """Most terms do."""
        return True

    def loss(self, local: Local, batch: Batch, passes: Passes) -> Tensor:
        """A scalar tensor, before the weight."""
        raise NotImplementedError


@dataclass(frozen=True)
class Merge(Part):
    """How a client joins its own state with what it downloads.

    Class attributes:
        personalises: each client ends with a model of its own (see `personal`).
        alone: a client that has a model is sent no other.
        shares: which weights leave a client, in words; empty: none.
    """

    personalises: ClassVar[bool] = False
    alone: ClassVar[bool] = False
    shares: ClassVar[str] = "the weights of all trained networks"

    def join(self, local: Local, downloaded: Weights) -> Weights:
        """The weights that training starts from."""
        return downloaded

    def private(self, networks: nn.ModuleDict) -> set[str]:
        """Names of weights that never leave the client."""
        return set()

    def personal(self, weights: Weights, own: Tree) -> Weights:
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
        """Fold in one client's update; ``"measure"`` in it is the door's `atoll.aggregation.measure.Measure`."""
        ...

    def close(self) -> Tree:
        """The server's next models."""
        ...


@dataclass(frozen=True)
class Aggregation(Part):
    """The server's fold of updates into its next models.

    Class attributes:
        whole_cohort: the mathematics needs all updates at once; they spill to disk.
        only_weights: works only where nothing but weights leaves a client.
    """

    whole_cohort: ClassVar[bool] = False
    only_weights: ClassVar[bool] = False

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

    def choose(self, local: Local, models: Tree) -> Weights:
        """On the client: the weights to begin with, out of those it was sent."""
        weights: Weights = models["global"]
        return weights

    def report(self, local: Local) -> Tree:
        """On the client: what the fold needs beside the weights and `statistics`."""
        return {}

    def reference(self, models: Tree, update: Tree) -> Weights:
        """The model that an update set out from (its distance to it is checked at the door)."""
        weights: Weights = models["global"]
        return weights

    def deploy(self, models: Tree, state: Tree) -> Deployment:
        """The named models of the finished run."""
        return Deployment(dict(models))


@dataclass(frozen=True)
class ServerStep(Part):
    """What the server does with the folded model: takes it as it is, or treats it as a gradient."""

    def step(self, state: Tree, current: Weights, folded: Weights, setting: Setting) -> tuple[Tree, Weights]:
        """The next slice of state (None before the first round) and the next weights."""
        return state, folded


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
