"""Lower bounds of the losses that an update reports."""

from __future__ import annotations

import math

from atoll.components.base import Objective, Term
from atoll.components.component import declared
from atoll.methods.method import Method


def least_loss(method: Method, name: str) -> float:
    """Return the lower bound of a component's loss, or of their sum ``"loss"``; −∞ if there is none.

    Args:
        method: The method.
        name: Name of an objective or a term, or ``"loss"``.

    Example:
        >>> from atoll.methods.least_loss import least_loss
        >>> from atoll.methods.method import Method
        >>> from atoll.objectives.simsiam import SimSiam
        >>> least_loss(Method(objective=SimSiam()), "loss")
        -1.0
    """
    bounds = {component.name: (weight, _bound(component)) for weight, component in method.losses}
    if name == "loss":
        return sum(weight * bound if weight > 0 else -math.inf for weight, bound in bounds.values())
    return bounds[name][1]


def _bound(component: Objective | Term) -> float:
    """Return a component's lower bound, unless it inherits the bound and overrides the loss."""
    return component.least_loss if declared(type(component), "least_loss", "loss") else -math.inf
