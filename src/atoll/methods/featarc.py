"""FeatARC: feature alignment regularisation and clustering (Wang et al., Dec-SSL, ICLR 2023, Algorithms 1 and 2).

The server holds C models θ_j, initially drawn independently. Client k with last model w̃_k (initially θ_{k mod C})

    chooses   I_k = argmin_j mean_x D(f_{θ_j}(x), f_{w̃_k}(x)),    D = −cos,                       (Algorithm 1)
    trains    w̃_k from θ_{I_k} on  L_SSL + λ · ½ [D(p(x⁺), sg z_g(x)) + D(p(·), sg z_g(x))],    (Algorithm 2)

and sends w̃_k and I_k. Each θ_j becomes the mean of the models of its clients, or is unchanged if it has none. f
is the representation of images without augmentation, in evaluation mode. The two readings of the regulariser:

    code      z_g is the representation under θ_{I_k}; p(x⁺) and p(·) are the embeddings of both augmented views
    paper     z_g is the embedding under θ_{I_k}; p is the prediction, of one view and of the plain image

One cluster without the regulariser is FedAvg; with it, "align only"; two clusters without it, "cluster only".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from atoll.aggregation.fedavg import FedAvg
from atoll.components.base import (
    VIEWS,
    Batch,
    ChoiceSpec,
    ClientContext,
    Deployment,
    Fold,
    Forward,
    Models,
    Passes,
    ServerState,
    Setting,
    SliceFold,
    Spec,
    Term,
    Update,
    UpdateGeometry,
)
from atoll.core.schema import Count
from atoll.core.tree import Tree, Weights
from atoll.methods.method import Method
from atoll.objectives.simclr import SimCLR


@dataclass(frozen=True)
class FeatARC(FedAvg):
    """C models, each the mean of the clients that chose it.

    Attributes:
        weights: A client's weight in its cluster's mean: ``"uniform"`` (Dec-SSL), ``"samples"`` or ``"batches"``.
        clusters: C, the number of clusters.
        features: The features that the assignment compares: representations or embeddings.
    """

    name: ClassVar[str] = "featarc"
    source: ClassVar[str] = "Wang et al. 2023 (Dec-SSL), Algorithm 1"
    keeps_updates: ClassVar[bool] = False
    needs_steps: ClassVar[bool] = True
    egress: ClassVar[tuple[str, ...]] = ("which of the cluster models it chose",)
    weights: Literal["samples", "batches", "uniform"] = "uniform"
    clusters: Count = 2
    features: Literal["h", "z"] = "h"

    @property
    def keeps(self) -> tuple[str, ...]:
        """Name the retained client state: the encoder, for the assignment; nothing if there is one cluster."""
        return ("its encoder as it left the last round",) if self.clusters > 1 else ()

    def embeds(self) -> bool:
        """Whether the assignment compares embeddings."""
        return self.features == "z" and self.clusters > 1

    def names(self) -> list[str]:
        """List the names of the clusters."""
        return [f"cluster-{j}" for j in range(self.clusters)]

    # The server's side.

    def models(self, start: Weights, setting: Setting) -> Models:
        """Draw the initial θ_j independently."""
        further = setting.further_models
        if self.clusters > 1 and further is None:
            raise ValueError(
                "a setting that was constructed by hand has no further initial models; set `further_models`"
            )
        return {name: further(j) if j and further else start for j, name in enumerate(self.names())}

    def init(self, setting: Setting) -> Tree:
        """Assign each client to its initial cluster: k mod C."""
        names = self.names()
        return {str(client): names[client % self.clusters] for client in range(setting.num_clients)}

    def open(self, models: Models, setting: Setting, round: int, scratch: Path | None) -> ClusterFold:
        """Start a mean for each cluster."""
        return ClusterFold(
            self.name,
            {
                name: super(FeatARC, self).open({"global": model}, setting, round, scratch)
                for name, model in models.items()
            },
        )

    def fold(self, state: Tree, setting: Setting, round: int) -> SliceFold:
        """Start to record the clients' choices."""
        return ChoiceFold(state)

    def reference(self, models: Models, update: Update) -> Weights:
        """Return the model that the client chose."""
        return models[update["parts"][self.name]]

    def declares(self, setting: Setting) -> Spec:
        """Declare the choice: the name of a cluster."""
        return ChoiceSpec(tuple(self.names()))

    def deploy(self, models: Models, state: ServerState) -> Deployment:
        """Return all cluster models, and each client's last choice."""
        return Deployment(dict(models), {int(k): name for k, name in state["parts"][self.name].items()})

    # The client's side.

    def choose(self, context: ClientContext, models: Models) -> Weights:
        """Choose the cluster model with the features nearest to those of the client's last model (Algorithm 1)."""
        scope, names = context.of(self), self.names()
        if scope.retained is None:
            scope.chosen = names[context.client % self.clusters]
        else:
            past = self._features(context, scope.retained)
            local_only = {
                name: weight for name, weight in scope.retained.items() if name not in context.shared
            }
            features = [self._features(context, {**models[n], **local_only}) for n in names]
            similarities = [float(cosine_similarity(made, past).mean()) for made in features]
            scope.chosen = names[similarities.index(max(similarities))]
        return models[scope.chosen]

    def finish(self, context: ClientContext) -> Tree:
        """Return the name of the chosen cluster."""
        return context.of(self).chosen

    def keep(self, context: ClientContext) -> Tree:
        """Retain the networks of w̃_k that the features need."""
        if not self.keeps:
            return None
        components = ("encoder.",) if self.features == "h" else ("encoder.", "projector.")
        state = context.networks.state_dict()
        names = [name for name in state if name.startswith(components) and name not in context.fixed]
        return {name: state[name].detach() for name in names}

    def _features(self, context: ClientContext, weights: Weights) -> Tensor:
        return context.outputs(context.frozen("featarc", weights), self.features)[0]


class ClusterFold:
    """One fold for each cluster."""

    def __init__(self, part: str, folds: dict[str, Fold]) -> None:
        self._part = part  # of an update, which names the cluster
        self._folds = folds

    def add(self, client: int, update: Update, geometry: UpdateGeometry) -> None:
        """Fold a client's model into the cluster that it chose."""
        self._folds[update["parts"][self._part]].add(client, update, geometry)

    def close(self) -> Models:
        """Return the next cluster models (Algorithm 1); a model that no client chose is unchanged."""
        return {name: fold.close()["global"] for name, fold in self._folds.items()}


class ChoiceFold:
    """Each client's last choice."""

    def __init__(self, state: Tree) -> None:
        self._choices = dict(state)

    def add(self, client: int, piece: Tree) -> None:
        """Record a client's choice."""
        self._choices[str(client)] = piece

    def close(self) -> Tree:
        """Return the last choices of all clients."""
        return self._choices


@dataclass(frozen=True)
class FeatureAlignment(Term):
    """The regulariser; ``weight`` is λ. The anchors z_g(x) are computed once a round.

    Attributes:
        weight: λ.
        reading: Reading of the regulariser: ``"paper"`` matches predictions with embeddings, ``"code"`` embeddings
            with representations.
    """

    replays: ClassVar[bool] = True
    name: ClassVar[str] = "featarc_alignment"
    source: ClassVar[str] = "Wang et al. 2023 (Dec-SSL), Algorithm 2"
    least_loss: ClassVar[float] = -1.0
    reading: Literal["paper", "code"] = "paper"

    def refuse(self, setting: Setting) -> str | None:
        """Refuse different sizes of representations and embeddings in the code's reading, which matches them."""
        if self.reading == "code" and setting.encoder_dim != setting.embedding_dim:
            return (
                f"'featarc_alignment' with reading = 'code' matches representations ({setting.encoder_dim} wide) "
                f"with embeddings ({setting.embedding_dim} wide); set model.projector_dim = "
                f"{setting.encoder_dim} or options.{self.name}.reading = 'paper'"
            )
        return None

    def forwards(self) -> Sequence[Forward]:
        """Pass both views, or one view and the image without augmentation, through the local networks."""
        return VIEWS if self.reading == "code" else (VIEWS[0], Forward("image"))

    def start(self, context: ClientContext) -> None:
        """Compute the anchors z_g(x) with the downloaded model."""
        received = context.frozen("global", context.received)
        (context.of(self).anchors,) = context.outputs(received, "h" if self.reading == "code" else "z")

    def loss(self, context: ClientContext, batch: Batch, passes: Passes) -> Tensor:
        """Mean of both distances (Algorithm 2), in [−1, 1]."""
        anchors = context.of(self).anchors
        zg = anchors[context.from_host(lambda: batch.indices)]
        predicts = self.reading == "paper" and "predictor" in context.networks
        outputs = [passes[forward] for forward in self.forwards()]
        return torch.stack(
            [-cosine_similarity(made.q if predicts else made.z, zg).mean() for made in outputs]
        ).mean()


METHOD = Method(
    objective=SimCLR(),
    terms=(FeatureAlignment(reading="code"),),
    aggregation=FeatARC(),
    title="FeatARC",
    paper=(
        "Wang et al., Does Learning from Decentralized Non-IID Unlabeled Data Benefit from Self Supervision?, 2023"
    ),
    family="Personalised and clustered methods",
)
ALIGN_ONLY = replace(METHOD, aggregation=FedAvg(weights="uniform"), title="FeatARC, align only")
CLUSTER_ONLY = replace(METHOD, terms=(), title="FeatARC, cluster only")
