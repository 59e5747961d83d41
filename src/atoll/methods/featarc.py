"""FeatARC: feature alignment regularisation and clustering (Wang et al., Dec-SSL, ICLR 2023, Algorithms 1 and 2).

The server holds C models θ_j, first drawn independently. Client k, whose last model is w̃_k (at first θ_{k mod C}),

    chooses   I_k = argmin_j mean_x D(f_{θ_j}(x), f_{w̃_k}(x)),    D = −cos,
    trains    w̃_k from θ_{I_k} on  L_SSL + λ · ½ [D(p(x⁺), sg z_g(x)) + D(p(·), sg z_g(x))],

and sends w̃_k and I_k. Each θ_j becomes the mean of its clients' models, or stays. f is the representation, of
images as they are, in evaluation mode. The two readings of the regulariser:

    code      z_g is the representation under θ_{I_k}; p(x⁺) and p(·) are the embeddings of both augmented views
    paper     z_g is the embedding under θ_{I_k}; p is the prediction, of one view and of the image as it is

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
from atoll.core.devices import upload
from atoll.core.schema import Count
from atoll.core.tree import Tree, Weights
from atoll.methods.method import Method
from atoll.objectives.simclr import SimCLR


@dataclass(frozen=True)
class FeatARC(FedAvg):
    """C models, each the mean of the clients that chose it.

    Attributes:
        weights: How a client weighs in its cluster's mean: ``"uniform"`` (Dec-SSL), ``"samples"`` or
            ``"batches"``.
        clusters: C.
        features: What the assignment compares: representations or embeddings.
    """

    name: ClassVar[str] = "featarc"
    source: ClassVar[str] = "Wang et al. 2023 (Dec-SSL), Algorithm 1"
    egress: ClassVar[tuple[str, ...]] = ("which of the cluster models it chose",)
    weights: Literal["samples", "batches", "uniform"] = "uniform"
    clusters: Count = 2
    features: Literal["h", "z"] = "h"

    @property
    def keeps(self) -> tuple[str, ...]:
        """What its features are computed with; needless where there is no choice."""
        return ("its encoder as it left the last round",) if self.clusters > 1 else ()

    def names(self) -> list[str]:
        """Of the clusters."""
        return [f"cluster-{j}" for j in range(self.clusters)]

    # The server's side.

    def models(self, start: Weights, setting: Setting) -> Models:
        """θ_j, drawn independently."""
        further = setting.further_models
        if self.clusters > 1 and further is None:
            raise ValueError(
                "a setting that was made by hand has no further initial models; give it `further_models`"
            )
        return {name: further(j) if j and further else start for j, name in enumerate(self.names())}

    def init(self, setting: Setting) -> Tree:
        """Which cluster each client is in: k mod C."""
        names = self.names()
        return {str(client): names[client % self.clusters] for client in range(setting.num_clients)}

    def open(self, models: Models, setting: Setting, round: int, scratch: Path | None) -> ClusterFold:
        """Begin a mean for each cluster."""
        return ClusterFold(
            {
                name: super(FeatARC, self).open({"global": model}, setting, round, scratch)
                for name, model in models.items()
            }
        )

    def fold(self, state: Tree, setting: Setting, round: int) -> SliceFold:
        """Begin to note who chose what."""
        return ChoiceFold(state)

    def reference(self, models: Models, update: Update) -> Weights:
        """The chosen model."""
        return models[update["parts"][self.name]]

    def declares(self, setting: Setting) -> Spec:
        """The choice is one of the clusters."""
        return ChoiceSpec(tuple(self.names()))

    def deploy(self, models: Models, state: ServerState) -> Deployment:
        """All cluster models, and each client's last choice."""
        return Deployment(dict(models), {int(k): name for k, name in state["parts"][self.name].items()})

    # The client's side.

    def choose(self, context: ClientContext, models: Models) -> Weights:
        """The cluster model whose features lie nearest to those of the client's last model."""
        scope, names = context.of(self), self.names()
        if scope.retained is None:
            scope.chosen = names[context.client % self.clusters]
        else:
            past = self._features(context, scope.retained)
            home = {name: weight for name, weight in scope.retained.items() if name not in context.shared}
            features = [self._features(context, {**models[n], **home}) for n in names]
            alike = [float(cosine_similarity(made, past).mean()) for made in features]
            scope.chosen = names[alike.index(max(alike))]
        return models[scope.chosen]

    def finish(self, context: ClientContext) -> Tree:
        """The choice."""
        return context.of(self).chosen

    def keep(self, context: ClientContext) -> Tree:
        """w̃_k: as much of it as features need."""
        if not self.keeps:
            return None
        components = ("encoder.",) if self.features == "h" else ("encoder.", "projector.")
        state = context.networks.state_dict()
        return {name: state[name].detach() for name in state if name.startswith(components)}

    def _features(self, context: ClientContext, weights: Weights) -> Tensor:
        return context.outputs(context.frozen("featarc", weights), self.features)[0]


class ClusterFold:
    """A fold for each cluster."""

    def __init__(self, folds: dict[str, Fold]) -> None:
        self._folds = folds

    def add(self, client: int, update: Update, geometry: UpdateGeometry) -> None:
        """Fold a client's model into the cluster that it chose."""
        self._folds[update["parts"][FeatARC.name]].add(client, update, geometry)

    def close(self) -> Models:
        """The next cluster models; one that nobody chose stays as it was."""
        return {name: fold.close()["global"] for name, fold in self._folds.items()}


class ChoiceFold:
    """Each client's last choice."""

    def __init__(self, state: Tree) -> None:
        self._choices = dict(state)

    def add(self, client: int, piece: Tree) -> None:
        """Note a choice."""
        self._choices[str(client)] = piece

    def close(self) -> Tree:
        """All choices."""
        return self._choices


@dataclass(frozen=True)
class FeatureAlignment(Term):
    """The regulariser; ``weight`` is λ. The anchors z_g(x) are computed once a round.

    Attributes:
        weight: λ.
        reading: Which of the two readings of the regulariser, see above.
    """

    name: ClassVar[str] = "featarc_alignment"
    source: ClassVar[str] = "Wang et al. 2023 (Dec-SSL), Algorithm 2"
    reading: Literal["paper", "code"] = "paper"

    def refuse(self, setting: Setting) -> str | None:
        """The code matches representations with embeddings, so they must have one size."""
        if self.reading == "code" and setting.encoder_dim != setting.embedding_dim:
            return (
                f"'featarc_alignment' as in the code matches representations ({setting.encoder_dim} wide) with "
                f"embeddings ({setting.embedding_dim} wide); set model.projector_dim = {setting.encoder_dim} or "
                f"options.{self.name}.reading = 'paper'"
            )
        return None

    def forwards(self) -> Sequence[Forward]:
        """Both views, or a view and the image."""
        return VIEWS if self.reading == "code" else (VIEWS[0], Forward("image"))

    def start(self, context: ClientContext) -> None:
        """Compute the anchors."""
        received = context.frozen("global", context.received)
        (context.of(self).anchors,) = context.outputs(received, "h" if self.reading == "code" else "z")

    def loss(self, context: ClientContext, batch: Batch, passes: Passes) -> Tensor:
        """The mean of both distances, in [−1, 1]."""
        anchors = context.of(self).anchors
        zg = anchors[upload(batch.indices, anchors.device)]
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
        "Wang et al., Does Decentralized Learning with Non-IID Unlabeled Data Benefit from Self Supervision?, 2023"
    ),
    family="Personalised and clustered methods",
)
ALIGN_ONLY = replace(METHOD, aggregation=FedAvg(weights="uniform"), title="FeatARC, align only")
CLUSTER_ONLY = replace(METHOD, terms=(), title="FeatARC, cluster only")
