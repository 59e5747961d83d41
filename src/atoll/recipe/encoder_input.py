"""Parts of a recipe that come from its encoder's own configuration, or from objects that Python code gives."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from atoll.core.config import over, read_settings
from atoll.core.errors import UserError, warn
from atoll.core.given import Given
from atoll.core.imports import code_words
from atoll.data.objects import give_data
from atoll.data.options import DataOptions
from atoll.data.views.options import PRESETS, ViewOptions
from atoll.data.views.transform import give_transform
from atoll.models import (
    ENCODER_OPTIONS,
    InputConfig,
    ModelOptions,
    call_it,
    give_encoder,
    input_config,
    is_external,
    is_own_code,
    weights_input,
)


def with_encoder(table: Mapping[str, Any], encoder: Any) -> dict[str, Any]:
    """Put an encoder that Python code gives, a module or a factory, into a recipe's table.

    Raises:
        UserError: It is neither; or an error of `with_input`.
    """
    unnamed = Given.named(call_it(encoder), "", encoder)  # its fingerprint depends on the images
    table = with_input(over(table, {"model": {"encoder": unnamed}}))
    named = give_encoder(encoder, _channels(table), _size(table) or DataOptions.image_size)
    return over(table, {"model": {"encoder": named}})


def with_data(table: Mapping[str, Any], data: Any, test_data: Any = None) -> dict[str, Any]:
    """Put images that Python code gives into a recipe's table; the keys of a dict become the recipe's clients.

    Raises:
        UserError: They are not images; see `give_data`.
    """
    given = {"source": "object", "path": give_data(data, test_data)}
    natural = {"partition": {"kind": "natural", "column": "client"}} if isinstance(data, Mapping) else {}
    return over(table, {"data": given, **natural})


def with_transform(table: Mapping[str, Any], transform: Any) -> dict[str, Any]:
    """Put a transform that Python code gives into a recipe's table.

    Raises:
        UserError: It is not callable.
    """
    return over(table, {"views": {"transform": give_transform(transform)}})


def with_input(table: Mapping[str, Any], own_code: bool = True) -> dict[str, Any]:
    """Complete a recipe's table with the input that the encoder's own configuration describes.

    Values of the recipe take precedence. Atoll's own encoders have no such configuration. For other encoders,
    options of Atoll's encoders, which a base may set, are dropped with a warning.

    Args:
        table: The recipe's table.
        own_code: Whether to read the configuration of an encoder in the user's code; this imports that code.

    Raises:
        UserError: Neither the recipe nor the configuration gives the size, or the mean and standard deviation; or
            ``own_code`` is false, and the recipe gives no size.
    """
    model = table.get("model", {})
    name = model.get("encoder", "")
    if isinstance(model.get("weights"), str):
        # A library's configuration describes the input for which its model was trained.
        configured = is_external(name) and not is_own_code(name)
        table = _with_statistics(table, weights_input(model["weights"], guess=not configured))
    if not is_external(name):
        return dict(table)
    table = {**table, "model": _without_options(table["model"])}
    views, size = table.get("views", {}), _size(table)
    if size and {"mean", "std"} <= views.keys():
        return table
    if is_own_code(name) and not own_code:
        if size:
            return table
        raise UserError(
            f"the encoder {code_words([name])} is code that was not imported, so the size of its images is "
            "unknown; set data.image_size, or read that code and add --run-code"
        )
    found = input_config(name, _channels(table), size)
    preset = PRESETS.get(views.get("preset", ViewOptions.preset), PRESETS["none"])
    normalises = preset.mean != PRESETS["none"].mean
    missing = []
    filled: dict[str, dict[str, Any]] = {"data": {}, "views": {}}
    if not size:
        filled["data"]["image_size"] = found.size
        missing += [] if found.size else ["data.image_size"]
    for key in ("mean", "std"):
        if key not in views:
            filled["views"][key] = getattr(found, key)
            missing += [] if getattr(found, key) or normalises else [f"views.{key}"]
    if missing:
        such = [f"{key}={64 if key == 'data.image_size' else [0.5]}" for key in missing]
        raise UserError(
            f"{_words(name)} does not say what input it was made for; set {' and '.join(missing)}, such as "
            + (
                f"{json.dumps(read_settings(such))} in the recipe"
                if isinstance(name, Given)
                else f"--set {' '.join(such)}"
            )
        )
    kept = {part: {key: list(v) if isinstance(v, tuple) else v for key, v in values.items() if v is not None}
            for part, values in filled.items()}  # fmt: skip
    return over(kept, table)


def _with_statistics(table: Mapping[str, Any], found: InputConfig) -> dict[str, Any]:
    """Add the mean and std of pretrained weights to a recipe, unless the recipe sets them."""
    known = found.for_channels(_channels(table))
    views = {"mean": known.mean, "std": known.std}
    return over({"views": {key: list(value) for key, value in views.items() if value}}, table)


def _without_options(model: Mapping[str, Any]) -> dict[str, Any]:
    for key in sorted(ENCODER_OPTIONS & model.keys()):
        if model[key] != getattr(ModelOptions, key):  # a complete recipe holds the defaults
            warn(f"model.{key} does not apply to {_words(model['encoder'])} and is ignored")
    return {key: value for key, value in model.items() if key not in ENCODER_OPTIONS}


def _words(name: str) -> str:
    """The encoder's name in messages; for a given object, the name that its author gave it."""
    return (
        f"the encoder {name.partition(':')[2].partition('#')[0] if isinstance(name, Given) else repr(name)}"
    )


def _channels(table: Mapping[str, Any]) -> int:
    return int(table.get("data", {}).get("channels", DataOptions.channels))


def _size(table: Mapping[str, Any]) -> int | None:
    """Side of the views in pixels; None if the table does not set it."""
    size: int | None = table.get("views", {}).get("size") or table.get("data", {}).get("image_size")
    return size
