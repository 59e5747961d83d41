"""``atoll evaluate``: evaluates the encoders of a finished run under a named protocol."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from atoll.commands.evaluator import client_shares, of_users
from atoll.commands.run_files import find_encoder, keep_if_possible, model_path, partition_of
from atoll.core.config import describe
from atoll.core.devices import find_device
from atoll.core.errors import UserError
from atoll.core.given import names_code, value_of
from atoll.core.imports import search
from atoll.core.process_state import standard_settings
from atoll.core.run_folder import HELD_OUT, Run
from atoll.core.text import plural
from atoll.data.images import ImageSet
from atoll.data.options import DataOptions
from atoll.data.source_warnings import warn_of_classes
from atoll.data.sources import load_data
from atoll.data.views.views import make_views
from atoll.engines.partitioning import evaluation_splits
from atoll.evaluation import evaluate, mean_over_clients
from atoll.models import Encoder, load_encoder
from atoll.models.layout import memory_layout
from atoll.recipe.recipe import Recipe, recipe_of


def with_data_settings(run: Run, settings: Sequence[str]) -> Recipe:
    """Load the recipe of a finished run, overridden with ``data.KEY=value`` settings.

    Raises:
        UserError: A setting is not in ``data``, or invalid.
    """
    other = next((text for text in settings if not text.startswith("data.")), None)
    if other is not None:
        raise UserError(
            f"--set {other} is not possible for a finished run; only settings of data.… can be changed"
        )
    return recipe_of(run, settings)


def evaluate_run(
    run: Run, protocol: str, settings: Sequence[str] = (), device: str | None = None
) -> dict[str, Any]:
    """Evaluate a finished run under a named protocol, and save the result in its folder.

    Args:
        run: The finished run.
        protocol: Name of the protocol.
        settings: ``data.KEY=value`` settings, for other images than the recipe's.
        device: As for `evaluate_on`.

    Returns:
        See `evaluate_on`.

    Raises:
        UserError: See `measure_run`; also if a setting is not in ``data``.
    """
    data = with_data_settings(run, settings).data if settings else None
    return evaluate_on(run, protocol, data, device=device)


def evaluate_on(
    run: Run,
    protocol: str,
    data: DataOptions | None = None,
    recipe: Recipe | None = None,
    device: str | None = None,
) -> dict[str, Any]:
    """Evaluate a finished run as `evaluate_run` does; the parameters are those of `measure_run`, and one more.

    Args:
        run: The finished run.
        protocol: Name of the protocol.
        data: Other images than the recipe's.
        recipe: The run's recipe.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``…, or ``"auto"`` (a GPU if there is one); None for the recipe's.

    Returns:
        The result of `measure_run` without ``by_model``, which is only in the file.

    Raises:
        UserError: See `measure_run`; also if there is no such device.
    """
    recipe = recipe or recipe_of(run)
    if device is not None:
        find_device(device, "--device")
        recipe = replace(recipe, engine=recipe.engine.on(device))
    else:
        try:
            recipe.engine.find_device()
        except UserError as error:
            raise UserError(f"{error}: --device cpu") from None
    search([protocol] if names_code(protocol) else [], None)
    results = {"protocol": protocol, **measure_run(run, [protocol], data, recipe)}
    stem = f"evaluation-{protocol.replace(':', '.')}"
    if data:
        results["data"] = describe(data)
        digits = hashlib.sha256(json.dumps(results["data"], sort_keys=True).encode()).hexdigest()[:8]
        stem += f"-on-{data.short_name}-{digits}"
    keep_if_possible(lambda: run.write(f"{stem}.json", json.dumps(results) + "\n"))
    return {key: value for key, value in results.items() if key != "by_model"}


def check_held_out(run: Run, record: Mapping[str, Any], images: ImageSet) -> None:
    """Compare the images of an evaluation with those of the run's evaluations so far.

    Raises:
        UserError: They are others.
    """
    if record.get("fingerprint", images.fingerprint) != images.fingerprint:
        raise UserError(
            f"{run.folder} was evaluated on other held-out images than its recipe's data contain now; restore "
            "those, choose another --out, or name images for the evaluation: --set data.source=folder data.path=…"
        )


@standard_settings()
def measure_run(
    run: Run, protocols: Sequence[str], data: DataOptions | None = None, recipe: Recipe | None = None
) -> dict[str, Any]:
    """Evaluate the encoder or the encoders of a finished run under named protocols.

    Args:
        run: The finished run.
        protocols: Names of the protocols.
        data: Other images than the recipe's; kNN and probes are fitted on their training split.
        recipe: The run's recipe, with the objects that the run was given; None to read it from the folder.

    Returns:
        The ``"split"`` of the evaluation, and the results of `atoll.evaluation.evaluate`; for several models
        the result of `atoll.evaluation.mean_over_clients`. On the test split of other images, the same for every
        seed, ``"fingerprints"`` of the training and the test images, too.

    Raises:
        UserError: The run has not finished, a protocol is unknown, the images lack the labels or the held-out split
            that it needs, or the recipe's images are no longer those of the partition.
    """
    paths, counts, users = _models(run)
    recipe = recipe or recipe_of(run)
    splits = load_data(data or recipe.data, recipe.seed)
    warn_of_classes(splits.train, splits.test, (data or recipe.data).limit)
    partition = partition_of(run)
    if data is None and partition and partition.fingerprint != splits.train.fingerprint:
        raise UserError(
            f"the clients of {run.folder} had other images than its recipe's data contain now; restore those, or "
            "choose images for the evaluation: --set data.source=folder data.path=…"
        )
    if data is None:
        check_held_out(run, run.read_json(HELD_OUT) or {}, splits.held_out[1])
    if partition and partition.fingerprint == splits.train.fingerprint:
        splits = evaluation_splits(splits, partition, recipe)
    split, images = splits.held_out
    known = (
        {"fingerprints": [splits.train.fingerprint, images.fingerprint]} if data and split == "test" else {}
    )
    data = data or recipe.data
    views = make_views(recipe.views, data.image_size, data.channels)
    client_ids = partition.client_ids(splits.train) if partition else None
    shares = client_shares(partition, splits.train, images, protocols)
    device = recipe.engine.use_device()

    def load(path: Path) -> Encoder:
        encoder = load_encoder(path, value_of(recipe.model.encoder)).to(device)
        if (made_for := encoder.metadata["channels"]) != data.channels:
            raise UserError(f"the encoder takes {plural(made_for, 'channel')}; set data.channels={made_for}")
        layout = memory_layout(encoder, recipe.engine.uses_channels_last())
        return encoder.to(memory_format=layout)

    by_model = {
        name: evaluate(
            load(path),
            splits.train,
            images,
            views,
            recipe.evaluation,
            seed=recipe.seed,
            protocols=protocols,
            client_ids=client_ids,
            client_tests=of_users(shares, users.get(name)),
            strict=True,
        )
        for name, path in paths.items()
    }
    return {"split": split, **known, **mean_over_clients(by_model, counts)}


def _models(run: Run) -> tuple[dict[str, Path], dict[str, int], dict[str, list[int]]]:
    """Files of a finished run's encoders by model, the number of clients that use each, and these clients.

    Before version 0.2, a run with several models recorded the numbers only.
    """
    only, record = find_encoder(run.folder), run.results
    counts: dict[str, int] = record.get("clients_by_model", {})
    if counts:
        return {name: model_path(run, name) for name in counts}, counts, record.get("users_by_model", {})
    partition = partition_of(run)
    everyone = list(range(len(partition))) if partition else []
    return {"": only}, {}, {"": next(iter(record.get("users_by_model", {}).values()), everyone)}
