"""Checks of what hooks return; an error in Atoll's own code later would not name the component."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from torch import Tensor

from atoll.components.axes import Aggregation
from atoll.components.component import Component
from atoll.components.messages import Models
from atoll.core.errors import UserError
from atoll.core.text import type_words

T = TypeVar("T")


def returned(component: Component, hook: str, value: T, kind: type, expected: str) -> T:
    """Return what a hook returned, if it is of the right kind.

    Args:
        component: The component.
        hook: The hook.
        value: What it returned.
        kind: The right kind.
        expected: What to return, for the message.

    Raises:
        UserError: It is of another kind.
    """
    if isinstance(value, kind):
        return value
    raise UserError(f"{component.name!r}.{hook} returns {in_words(value)}; return {expected}")


def returned_models(aggregation: Aggregation, hook: str, value: Models) -> Models:
    """Return the models that a hook returned, if they have names and the aggregation's other hooks find theirs.

    Raises:
        UserError: They are not models by name, or ``choose`` or ``reference`` would miss ``"global"``.
    """
    expected = 'the models by name, such as {"global": weights}'
    models = returned(aggregation, hook, value, Mapping, expected)
    for name, model in models.items():
        returned(aggregation, f"{hook}()[{name!r}]", model, Mapping, expected)
    for reader in ("choose", "reference"):
        reads = getattr(type(aggregation), reader) is getattr(Aggregation, reader)
        if reads and models and "global" not in models:
            raise UserError(
                f"{aggregation.name!r}.{hook} returns the models {', '.join(map(repr, models))}, and its {reader} "
                f'reads the model "global"; return one of this name, or override {reader}'
            )
    return models


def sentence(component: Component, hook: str, value: str | None) -> str | None:
    """Return the sentence with which a hook refuses; None if it refuses nothing.

    Raises:
        UserError: It is something else that is true.
    """
    return returned(component, hook, value, str, "the reason in a sentence, or None") if value else None


def in_words(value: object) -> str:
    """Describe a value in an error message, with its article."""
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)} of {value.dtype}"
    return "nothing" if value is None else type_words(value)
