"""FedCA: federated contrastive averaging with dictionary and alignment (Zhang et al., FITEE 2023).

Clients train on

    L = CE([ẑ₁ẑ₂ᵀ, ẑ₁Dᵀ] / t, (0, …, N−1)) + β Σ_x (‖f_a(x) − f(x)‖² + ‖g_a f_a(x) − g f(x)‖²)     (Eqs. 4-8, 11-14)

D is a dictionary of normalised projections from all clients: further negatives, the same for all clients. After
training, client u passes its images, without augmentation, through its networks (in evaluation mode), ensembles the
projections over its rounds, and sends some of them:

    Z_i ← α Z_i + (1 − α) z_i,  Z_i⁰ = 0;    upload Z_i / ‖Z_i‖                                   (Eqs. 9-10)

The alignment model (f_a, g_a) is trained first, centrally, on public images; x are public images too. The paper
does not specify t, how M rows are selected from more projections (here each client sends ⌈M/|S|⌉ at random, and the
server selects M of those), or the schedule on which the alignment model is trained. Its text computes the
dictionary with the downloaded model in one place and with the trained model in another; Algorithm 1 uses the
trained model, as does this implementation. The dictionary of round 1 is empty.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from atoll.components.base import (
    VIEWS,
    Batch,
    ClientContext,
    Features,
    Forward,
    Objective,
    Passes,
    Prerequisite,
    Setting,
    Spec,
    TensorSpec,
    Term,
    Trained,
    UpTo,
)
from atoll.components.declaration import MOST_IMAGES
from atoll.core.rng import stream
from atoll.core.schema import AtLeast, Below, Positive
from atoll.core.tree import Tree
from atoll.functional import dictionary_contrast
from atoll.methods.method import Method
from atoll.models.norms import norm_layers

ALIGNMENT = Forward("public", "alignment")


@dataclass(frozen=True)
class DictionaryContrast(Objective):
    """Contrast with the other view's batch and the shared dictionary.

    Attributes:
        temperature: t, which the paper does not state.
        size: M, the rows of the dictionary; with 0, the loss is cross-view InfoNCE and no projection leaves a
            client.
        sampling: ``"client"``: each client sends its share of M, drawn at random; ``"server"``: each client sends
            all its projections, and the server draws M from them (and holds all of them until then).
        row_images: Images whose projections are the rows: the client's samples without augmentation (``"plain"``),
            one augmented view of each (``"view"``), or the mean of two views (``"views"``).
        row_model: Model that projects them: the ``"trained"`` one (Algorithm 1), or the ``"downloaded"`` one before
            the round's training (the text).
        exclude_own: Exclude a client's rows, which are false negatives, from the dictionary that it receives.
        momentum: α of temporal ensembling; 0 turns it off (Fig. 5).
    """

    replays: ClassVar[bool] = True
    name: ClassVar[str] = "fedca_dictionary"
    source: ClassVar[str] = "Zhang et al. 2023 (FedCA), Eqs. 4-10"
    least_loss: ClassVar[float] = 0.0
    temperature: Positive = 0.5
    size: Annotated[int, AtLeast(0)] = 1024
    sampling: Literal["client", "server"] = "client"
    row_images: Literal["plain", "view", "views"] = "plain"
    row_model: Literal["trained", "downloaded"] = "trained"
    exclude_own: bool = False
    momentum: Annotated[float, AtLeast(0), Below(1)] = 0.5

    @property
    def egress(self) -> tuple[str, ...]:
        """Name the projections that leave a client."""
        some = "some" if self.sampling == "client" else "all"
        return (f"the normalised projections of {some} of its images",) if self.size else ()

    @property
    def keeps(self) -> tuple[str, ...]:
        """Name the retained client state: the ensembled projections."""
        return ("the ensembled projection of each of its images",) if self.size and self.momentum else ()

    def send(self, state: Tree, client: int, cohort: Sequence[int], round: int) -> Tree:
        """Send the dictionary D, and the number of rows that the client must return."""
        rows = None if state is None else state["rows"]
        if rows is not None and self.exclude_own:
            rows = rows[state["owners"] != client]
        return {
            "rows": rows,
            "share": math.ceil(self.size / len(cohort)) if self.sampling == "client" else None,
        }

    def forwards(self) -> Sequence[Forward]:
        """Pass both views through the local networks."""
        return VIEWS

    def start(self, context: ClientContext) -> None:
        """Load the dictionary D onto the device."""
        scope = context.of(self)
        rows = scope.message["rows"]
        scope.dictionary = torch.zeros(0, context.setting.embedding_dim) if rows is None else rows
        scope.dictionary = scope.dictionary.to(context.device)
        if self.size and self.row_model == "downloaded":
            scope.projections = self._project(context)

    def loss(self, context: ClientContext, batch: Batch, passes: Passes) -> Tensor:
        """Cross-entropy over N + M candidates (Eqs. 4-8)."""
        z1, z2 = (passes[view].z for view in VIEWS)
        return dictionary_contrast(z1, z2, context.of(self).dictionary, self.temperature)

    def finish(self, context: ClientContext) -> Tree:
        """Ensemble the projections over rounds, and return some of them (Eqs. 9 and 10)."""
        if not self.size:
            return None
        scope = context.of(self)
        z = scope.projections if self.row_model == "downloaded" else self._project(context)
        kept = context.retained(self)
        past = torch.zeros_like(z) if kept is None else kept.to(z.device)
        scope.ensemble = self.momentum * past + (1 - self.momentum) * z  # Eq. 9
        rows, share = normalize(scope.ensemble), scope.message["share"]
        if share is None:
            return rows
        return rows[torch.randperm(len(rows), generator=context.stream("fedca-rows"))[:share].to(rows.device)]

    def _project(self, context: ClientContext) -> Tensor:
        """Project the client's images with its networks as they are."""
        draws = None if self.row_images == "plain" else context.stream("fedca-row-views")
        passes = 2 if self.row_images == "views" else 1
        z = [context.outputs(context.networks, "z", augment=draws)[0] for _ in range(passes)]
        return torch.stack(z).mean(dim=0)

    def keep(self, context: ClientContext) -> Tree:
        """Return the ensembled projections Z."""
        return context.of(self).ensemble if self.keeps else None

    def declares(self, setting: Setting) -> Spec | None:
        """Declare normalised projections: at most M, or one for each of the client's images."""
        if not self.size:
            return None
        rows = self.size if self.sampling == "client" else max(setting.sizes, default=MOST_IMAGES)
        return TensorSpec((UpTo(rows), setting.embedding_dim), unit_rows=True)

    def fold(self, state: Tree, setting: Setting, round: int) -> DictionaryFold | None:
        """Start the next dictionary."""
        return (
            DictionaryFold(self.size, stream(setting.seed, "fedca-dictionary", round)) if self.size else None
        )


class DictionaryFold:
    """Concatenation of the clients' rows, in client order; if there are more than M, M of them at random."""

    def __init__(self, size: int, draws: torch.Generator) -> None:
        self._size = size
        self._draws = draws
        self._rows: list[Tensor] = []
        self._owners: list[Tensor] = []

    def add(self, client: int, piece: Tree) -> None:
        """Append a client's rows."""
        self._rows.append(piece.clone())
        self._owners.append(torch.full((len(piece),), client))

    def close(self) -> Tree:
        """Return the dictionary D, and the client of each row."""
        rows, owners = torch.cat(self._rows), torch.cat(self._owners)
        if len(rows) > self._size:
            kept = torch.randperm(len(rows), generator=self._draws)[: self._size].sort().values
            rows, owners = rows[kept], owners[kept]
        return {"rows": rows, "owners": owners}


@dataclass(frozen=True)
class Alignment(Term):
    """Match the alignment model's outputs on public images; ``weight`` is β.

    Every step draws a new random batch of public images, of the same size as the local batch.

    Attributes:
        weight: β.
        data: The public images, as a separate ``[data]`` table. SimCLR trains the alignment model on them, with
            this run's networks, views and optimiser.
        recipe: Instead of ``data``, a complete recipe for the alignment model's run: a preset's name or a TOML
            file.
        size: Maximum number of public images, which train the model and are sent to each client once.
        train_epochs: Epochs of the alignment model's training; the paper states none.
        reduction: Reduction over a step's public images: their sum (the paper) or their mean.
        normalise: Compare normalised representations and embeddings; otherwise compare them as they are (Eqs. 11
            and 12).
        batch_norm: BatchNorm of the local networks for public images: ``"train"``, as for a training batch, so that
            public images enter the running statistics; ``"batch"``: the batch's statistics, which do not enter
            them; ``"running"``: the running statistics, as in evaluation. The paper states none.
    """

    replays: ClassVar[bool] = True
    name: ClassVar[str] = "fedca_alignment"
    source: ClassVar[str] = "Zhang et al. 2023 (FedCA), Eqs. 11-13"
    least_loss: ClassVar[float] = 0.0
    weight: float = 0.01
    data: dict[str, Any] = field(default_factory=dict)
    recipe: str = ""
    size: Annotated[int, AtLeast(2)] = 3200
    train_epochs: int = 100
    reduction: Literal["sum", "mean"] = "sum"
    normalise: bool = False
    batch_norm: Literal["train", "batch", "running"] = "train"

    def refuse(self, setting: Setting) -> str | None:
        """Refuse recipes that name no public images, or name them twice."""
        if bool(self.data) == bool(self.recipe):
            return (
                "'fedca_alignment' first trains its alignment model on public images; name them in one place, "
                f"[options.{self.name}.data] (source = …, path = …) or options.{self.name}.recipe"
            )
        return None

    def prerequisites(self) -> dict[str, Prerequisite]:
        """Require the alignment model: centralised SimCLR on the public images."""
        if self.recipe:
            return {"alignment": Prerequisite(self.recipe)}
        public = {"limit": self.size, "test_fraction": 0.0, **self.data}
        return {"alignment": Prerequisite.centralised("fed_simclr", public, self.train_epochs)}

    def constants(self, setting: Setting, prerequisites: Mapping[str, Trained]) -> Tree:
        """Return the alignment model and the public images."""
        trained = prerequisites["alignment"]
        chosen = torch.randperm(len(trained.images), generator=stream(setting.seed, "fedca-public"))
        return {"model": trained.weights, "images": trained.images.gather(chosen[: self.size])}

    def forwards(self) -> Sequence[Forward]:
        """Pass public images through the alignment model; `loss` passes them through the local networks."""
        return (ALIGNMENT,)

    def start(self, context: ClientContext) -> None:
        """Load the alignment model as a frozen copy."""
        scope = context.of(self)
        context.frozen("alignment", scope.constants["model"])
        scope.draws = context.stream("fedca-public")

    def inputs(self, context: ClientContext, batch: Batch) -> dict[str, Tensor]:
        """Draw this step's public images."""
        scope = context.of(self)
        images: Tensor = scope.constants["images"]
        rows = torch.randperm(len(images), generator=scope.draws)[: len(batch.indices)]
        return {"public": context.data.plain(images[rows])}

    def loss(self, context: ClientContext, batch: Batch, passes: Passes) -> Tensor:
        """Squared distances of representations (Eq. 11) and of embeddings (Eq. 12), summed or averaged."""
        alignment, networks = passes[ALIGNMENT], context.networks
        with _batch_norm(networks, self.batch_norm):
            local = Features(networks, networks["encoder"](batch.images["public"]), context.after)
            distances = self._distance(alignment.h, local.h) + self._distance(alignment.z, local.z)
        return distances.sum() if self.reduction == "sum" else distances.mean()

    def _distance(self, a: Tensor, b: Tensor) -> Tensor:
        """Compute ‖a − b‖² of each row, in float32 for any precision of the networks."""
        a, b = a.float(), b.float()
        if self.normalise:
            a, b = normalize(a), normalize(b)
        return (a - b).square().sum(dim=1)


@contextmanager
def _batch_norm(networks: nn.Module, mode: str) -> Iterator[None]:
    """Set the mode of all BatchNorm layers in training inside the block; frozen ones stay as they are."""
    layers = [norm for norm in norm_layers(networks).values() if norm.training and norm.track_running_stats]
    for layer in layers:
        layer.training = mode != "running"
        layer.track_running_stats = mode != "batch"  # without them, PyTorch neither reads nor updates them
    try:
        yield
    finally:
        for layer in layers:
            layer.training = layer.track_running_stats = True


METHOD = Method(
    objective=DictionaryContrast(),
    terms=(Alignment(),),
    title="FedCA",
    paper="Zhang et al., Federated Unsupervised Representation Learning, FITEE 2023",
    family="Federated self-supervised methods",
)
