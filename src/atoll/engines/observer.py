"""What the server records of a round in addition to its model: kept models, and measures of local models.

The observer sees each update once, after its acceptance and before the next update, on the server side of every
engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from atoll.components.base import Aggregation
from atoll.components.messages import ServerState, UpdateGeometry
from atoll.core.tree import Weights, clone
from atoll.data.images import ImageSet
from atoll.data.sources import Splits
from atoll.evaluation.embed import embed, sample
from atoll.evaluation.metrics import PERCENTILES
from atoll.functional import representation_angle, weight_distance
from atoll.recipe.recipe import Recipe

if TYPE_CHECKING:
    from atoll.engines.federation import Federation

OF_UPDATES = ("layers", "distances", "angles")  # measures of single clients' updates
OF_IMAGES = ("norms", "angles")  # measures that need images here


def refuse_measures(recipe: Recipe, splits: Splits) -> str | None:
    """Return a sentence that says why the recipe's ``evaluation.measures`` cannot be taken, or None."""
    wanted, method = recipe.evaluation.measures, recipe.composed
    for name in wanted:
        if name in OF_UPDATES and (reason := method.hides_updates):
            return f"evaluation.measures cannot measure {name!r}: {reason}; remove it"
        if name in OF_IMAGES and not len(splits.held_out[1]):
            return f"evaluation.measures cannot measure {name!r} without images on this machine; remove it"
        if name == "norms" and method.merge.alone:
            alone = f"with {method.merge.name!r} no model is shared"
            return f"evaluation.measures cannot measure 'norms': {alone}; remove it"
        if name == "consensus" and type(method.aggregation).measure is Aggregation.measure:
            return (
                f"evaluation.measures cannot measure 'consensus' of {method.aggregation.name!r}, which has no "
                "graph of clients; remove it, or set method.aggregation = 'gossip'"
            )
    return None


class Observer:
    """Keeps the models that the recipe names, and takes its ``evaluation.measures``, round by round.

    Args:
        federation: The federation; its networks are loaded with the models that are measured.
        keep: Saves a model of a round by name.
    """

    def __init__(self, federation: Federation, keep: Callable[[int, str, Weights], None]) -> None:
        self._federation = federation
        self._keep = keep
        self._round = 0
        self._measures: tuple[str, ...] = ()
        self._geometries: list[UpdateGeometry] = []
        self._local: dict[int, Weights] = {}

    def keep(self, round: int, state: ServerState) -> None:
        """Keep the models of a round, if the recipe asks for it; round 0 has the initial models."""
        if not self._federation.recipe.train.keeps_models(round):
            return
        models = self._federation.recipe.composed.deploy(state).models
        for name, weights in models.items():
            self._keep(round, "global" if len(models) == 1 else f"global-{name}", weights)

    def open(self, round: int) -> None:
        """Start a round."""
        options = self._federation.recipe.evaluation
        due = round % options.measures_every == 0 or round == self._federation.recipe.train.rounds
        self._round, self._measures = round, options.measures if due else ()
        self._geometries, self._local = [], {}

    def update(self, client: int, weights: Weights, geometry: UpdateGeometry) -> None:
        """Record an accepted update, whose tensors are valid only now."""
        recipe = self._federation.recipe
        if recipe.train.keeps_local_models(self._round):
            self._keep(self._round, f"client-{client}", weights)
        if "layers" in self._measures:
            self._geometries.append(geometry)
        compared = {"distances", "angles"} & set(self._measures)
        if compared and len(self._local) < recipe.evaluation.measured_clients:
            self._local[client] = clone(weights)

    def close(self, state: ServerState) -> tuple[dict[str, float], dict[str, float]]:
        """Finish a round, after its fold.

        Returns:
            The measures by name, and the mean cosine of each layer by the layer's name, if measured.
        """
        federation, measures = self._federation, self._measures
        found: dict[str, float] = {}
        layers = self._layers() if "layers" in measures else {}
        if layers:
            found |= {
                "layers/mean": sum(layers.values()) / len(layers),
                "layers/lowest": min(layers.values()),
            }
        if self._local and "distances" in measures:
            found |= self._distances(state)
        if len(self._local) > 1 and "angles" in measures:
            found |= self._angles(state)
        if "norms" in measures:
            found |= self._norms(state)
        if "consensus" in measures:
            method, setting = federation.recipe.composed, federation.setting
            gossip = method.aggregation.measure(state["models"], setting, self._round)
            found |= {f"consensus/{name}": value for name, value in gossip.items()}
        self._geometries, self._local = [], {}
        return found, layers

    def _layers(self) -> dict[str, float]:
        """Mean cosine between the local models and the models that the clients received, by weight tensor."""
        buffers = self._federation.setting.buffers
        names = (
            [name for name in self._geometries[0].moved if name not in buffers] if self._geometries else []
        )
        cosines = {name: [geometry.cosine([name]) for geometry in self._geometries] for name in names}
        return {name: sum(values) / len(values) for name, values in cosines.items()}

    def _global(self, state: ServerState, client: int) -> Weights:
        """The round's resulting model that a client uses; the federation's own weights if there is none."""
        return self._federation.recipe.composed.deploy(state).model_of(client)

    def _distances(self, state: ServerState) -> dict[str, float]:
        counted = self._federation.setting.running_statistics

        def distance(a: Weights, b: Weights) -> float:
            names = [name for name in a if name in b and name not in counted]
            return float(
                weight_distance({name: a[name] for name in names}, {name: b[name] for name in names})
            )

        to_global = [distance(local, self._global(state, client)) for client, local in self._local.items()]
        found = {"distances/global": sum(to_global) / len(to_global)}
        between = [distance(a, b) for a, b in combinations(self._local.values(), 2)]
        return found | ({"distances/clients": sum(between) / len(between)} if between else {})

    def _angles(self, state: ServerState) -> dict[str, float]:
        shown = [
            self._features({**self._global(state, client), **local}) for client, local in self._local.items()
        ]
        angles = torch.cat([representation_angle(a, b) for a, b in combinations(shown, 2)]).double()
        ranked = np.percentile(angles.numpy(), PERCENTILES)
        marks = {f"angles/p{p}": float(mark) for p, mark in zip(PERCENTILES, ranked, strict=True)}
        return {"angles/mean": float(angles.mean()), **marks}

    def _norms(self, state: ServerState) -> dict[str, float]:
        """Mean norms of representations and embeddings, over the clients' models if there are several."""
        federation, networks = self._federation, self._federation.networks
        models = federation.recipe.composed.deploy(state)
        clients = map(models.name_of, range(federation.setting.num_clients))
        users = Counter(clients) if models.models else Counter({"": 1})
        norms: dict[str, list[float]] = {}
        for name in users:
            h = self._features(models.models.get(name, {}))
            norms.setdefault("norms/h", []).append(float(h.norm(dim=1).mean()))
            if "projector" in networks:
                z = self._features({}, nn.Sequential(federation.encoder, networks["projector"]))
                norms.setdefault("norms/z", []).append(float(z.norm(dim=1).mean()))
        counts = list(users.values())
        return {name: float(np.average(values, weights=counts)) for name, values in norms.items()}

    def _features(self, weights: Weights, network: nn.Module | None = None) -> Tensor:
        """Load weights and embed the held-out images; missing weights are unchanged."""
        federation = self._federation
        federation.load(weights)
        images: ImageSet = federation.splits.held_out[1]
        options, seed = federation.recipe.evaluation, federation.recipe.seed
        some = images.subset(sample(len(images), options.geometry_samples, seed, "measures"))
        plain, size = federation.views.plain, options.batch_size
        return embed(network or federation.encoder, plain, some.images, batch_size=size).cpu()
