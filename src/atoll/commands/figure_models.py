"""What figures show of a run's kept models: maps of representations, and the loss around a trajectory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from atoll.core.kept_models import kept_models, kept_rounds
from atoll.core.run_folder import Run
from atoll.core.tree import Weights, load
from atoll.engines.federation import Federation
from atoll.evaluation.embed import embed
from atoll.evaluation.embedding_map import embedding_map, map_rows
from atoll.functional import trajectory_plane, weight_distance
from atoll.recipe.recipe import load_recipe

MAP_POINTS = 1500  # on one map, all its models together
MARGIN = 0.4  # of a landscape beyond its trajectory, as a share of the trajectory's extent
LANDSCAPE_CLIENTS = 2  # whose first batch the loss of a landscape is averaged over


def representation_maps(
    run: Run, models: Sequence[str], colour: str, classes: Sequence[int] = ()
) -> dict[str, Any] | None:
    """Place the held-out images' representations by several kept models on one map (PCA, then t-SNE).

    Args:
        run: The run.
        models: Names of models that the run kept of its last kept round.
        colour: Colour the points by ``"class"`` or by ``"model"``.
        classes: Numbers of the classes that have a name; the others are ``"other"``. All if empty.

    Returns:
        ``points``, the group of each, the ``names`` of the groups, and ``remarks`` with the distances between the
        models' weights; None if the run kept no such models.
    """
    rounds = kept_rounds(run.folder)
    files = kept_models(run.folder, rounds[-1]) if rounds else {}
    if not set(models) <= files.keys():
        return None
    kept = {name: load(path) for name, path in files.items() if name in (*models, "global")}
    federation = Federation(load_recipe(run.recipe_path))
    images = federation.splits.held_out[1]
    size = min(MAP_POINTS, federation.recipe.evaluation.geometry_samples)
    images = images.subset(map_rows(len(images), federation.recipe.seed, size // len(models)))
    shown = []
    for name in models:
        encoder = federation.load({**kept.get("global", {}), **kept[name]})
        shown.append(embed(encoder, federation.views.plain, images.images).cpu())
    points = embedding_map(torch.cat(shown), federation.recipe.seed)
    names, groups = _groups(len(images), images.labels, images.classes, models, colour, classes)
    return {
        "points": [[round(float(x), 3), round(float(y), 3)] for x, y in points],
        "groups": groups,
        "names": names,
        "remarks": _distances(kept, models, federation),
    }


def _groups(
    count: int,
    labels: Tensor | None,
    classes: Sequence[str],
    models: Sequence[str],
    colour: str,
    wanted: Sequence[int],
) -> tuple[list[str], list[int]]:
    if colour == "model" or labels is None:
        return list(models), [k for k in range(len(models)) for _ in range(count)]
    chosen = list(wanted) or sorted(set(labels.tolist()))
    names = [classes[k] if k < len(classes) else str(k) for k in chosen]
    other = len(chosen)
    groups = [chosen.index(k) if k in chosen else other for k in labels.tolist()] * len(models)
    return names + (["other"] if other in groups else []), groups


def _distances(kept: dict[str, Weights], models: Sequence[str], federation: Federation) -> list[str]:
    counted = federation.setting.running_statistics
    weights = {
        name: {key: tensor for key, tensor in kept[name].items() if key not in counted} for name in models
    }
    pairs = [(a, b) for a, b in combinations(models, 2) if weights[a].keys() == weights[b].keys()]
    return [
        f"weight distance {a} – {b}: {float(weight_distance(weights[a], weights[b])):.2f}" for a, b in pairs
    ]


def landscape(run: Run, resolution: int) -> dict[str, Any] | None:
    """Compute the local loss on the plane through a run's kept models, around the last one.

    The loss is that of the method, in training mode, on the first batch of the first clients, whose views are the
    same everywhere; running statistics do not matter in it. Beside the model, the server's state and the clients'
    are those of a first round, because a run keeps models alone. The plane is `atoll.functional.trajectory_plane`
    of the trained weights.

    Args:
        run: The run, which kept its resulting models by interval.
        resolution: Number of points on each axis.

    Returns:
        The ``xs`` and ``ys`` of the grid, the ``loss`` by row, and the ``path`` of the models; None if the run kept
        fewer than two models.
    """
    kept = [kept_models(run.folder, round) for round in kept_rounds(run.folder)]
    paths = [files["global"] for files in kept if "global" in files]
    if len(paths) < 2:
        return None
    recipe = load_recipe(run.recipe_path)
    federation = Federation(recipe)
    last: Weights = load(paths[-1])
    names = [name for name in last if name not in federation.setting.buffers]
    rows = torch.stack([_flat(load(path), names) for path in paths])
    directions, places = trajectory_plane(rows)
    xs, ys = (_axis(places[:, axis], resolution) for axis in (0, 1))
    origin = rows[-1]
    loss = []
    for y in ys:
        line = []
        for x in xs:
            moved = origin + x * directions[0] + y * directions[1]
            line.append(_loss(federation, {**last, **_unflat(moved, last, names)}))
        loss.append(line)
    return {"xs": xs, "ys": ys, "loss": loss, "path": places.tolist()}


def _axis(places: Tensor, resolution: int) -> list[float]:
    low, high = float(places.min()), float(places.max())
    margin = MARGIN * ((high - low) or 1.0)
    return torch.linspace(low - margin, high + margin, resolution).tolist()


def _loss(federation: Federation, weights: Weights) -> float:
    """Mean loss of a model on the first batch of the first clients."""
    method, setting = federation.recipe.composed, federation.setting
    state = method.init(setting, weights)
    side = federation.client_side(method.constants(setting, {}))
    clients = range(min(LANDSCAPE_CLIENTS, setting.num_clients))
    losses = []
    for client in clients:
        data = federation.client_data(client)
        side.start(method.send(state, setting, client, list(clients), 1), None, data)
        with torch.no_grad():
            losses.append(float(side.step(next(iter(data.batches(1, 1, method.images))))))
    return sum(losses) / len(losses)


def _flat(weights: Weights, names: Sequence[str]) -> Tensor:
    return torch.cat([weights[name].float().flatten() for name in names])


def _unflat(vector: Tensor, like: Weights, names: Sequence[str]) -> Weights:
    pieces = torch.split(vector, [like[name].numel() for name in names])
    return {name: piece.view(like[name].shape) for name, piece in zip(names, pieces, strict=True)}
