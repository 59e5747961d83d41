"""A round at the server: fold updates into the models and the components' slices, then take the server step."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from atoll.aggregation.secure_sum import SumFold
from atoll.components.axes import STATISTICS
from atoll.components.base import (
    Component,
    Fold,
    Models,
    ServerState,
    ServerStep,
    Setting,
    SliceFold,
    Update,
    UpdateGeometry,
)
from atoll.components.results import in_words
from atoll.core.errors import OldCodeWarning, UserError, warn
from atoll.core.tree import Tree, as_sent, checked, clone

if TYPE_CHECKING:
    from atoll.methods.method import Method

T = TypeVar("T")


class RoundFold:
    """A round's fold: the aggregation folds models, the components fold their slices, then the server steps.

    Components and the server step get copies of the state, which they may change: clients still train with what
    they were sent of the state itself, and the last round's checkpoint may not be written yet.
    """

    def __init__(
        self,
        method: Method,
        state: ServerState,
        setting: Setting,
        round: int,
        scratch: Path | None,
    ) -> None:
        aggregation = method.aggregation
        self._aggregation = aggregation.name
        self._server = method.server
        self._state = state
        self._setting = setting
        opened = aggregation.open(state["models"], setting, round, scratch)
        self._models = _with_geometry(_fold(aggregation, "open", opened, "add(client, update, geometry)"))
        self._moved = False  # whether the weights of a client that was added changed
        self._slices: dict[str, SliceFold] = {}
        for component in method.components:
            fold: SliceFold | None
            if aggregation.splits(component):
                near = aggregation.neighbourhoods(setting, round)
                fold = _NeighbourFolds(component, state["parts"].get(component.name), setting, round, near)
            else:
                fold = component.fold(clone(state["parts"].get(component.name)), setting, round)
            if fold is not None:
                self._slices[component.name] = _fold(component, "fold", fold, "add(client, piece)")

    def add(self, client: int, update: Update, geometry: UpdateGeometry) -> None:
        """Fold in one client's update, in the order of client ids.

        Raises:
            UserError: The aggregation reads a number that its `statistics` do not name.
        """
        try:
            self._models.add(client, update, geometry)
        except KeyError as error:
            name = error.args[0] if error.args else None
            if name in update or name not in STATISTICS:
                raise
            raise UserError(
                f"the fold of {self._aggregation!r} reads update[{name!r}], which an update contains if the "
                f"aggregation's statistics name it; add {name!r}, as in statistics: ClassVar[tuple[str, ...]] = "
                f"({name!r},)"
            ) from error
        self._moved |= any(geometry.moved.values())
        for name, fold in self._slices.items():
            fold.add(client, update["parts"].get(name))

    def add_total(self, total: Tensor, clients: int) -> float | None:
        """Fold in the sum of several clients' terms; return their mean loss (see `SecureSum`)."""
        assert isinstance(self._models, SumFold)  # noqa: S101
        return self._models.add_total(total, clients)

    def close(self) -> ServerState:
        """Return the server's next state.

        Raises:
            UserError: The aggregation or the server step returns no models like those it was given, or one that is
                not finite, or a component no tree.
        """
        models = self._folded()
        slices = dict(self._state["parts"])
        slices.update(checked({name: fold.close() for name, fold in self._slices.items()}, "fold"))
        server = self._server
        steps = dict(slices.get(server.name) or {})
        takes_steps = type(server).step is not ServerStep.step
        for name, folded in models.items():
            current = self._state["models"][name]
            if folded is not current and takes_steps:  # no step for a cluster that no client chose
                before = (clone(steps.get(name)), clone(current))
                steps[name], models[name] = server.step(*before, folded, self._setting)
        if takes_steps:
            self._check(models, f"the step of {server.name!r} returns")
        steps = checked({server.name: steps}, "step")[server.name]
        if any(value is not None for value in steps.values()):
            slices[server.name] = steps
        return {"models": as_sent(models), "parts": slices}

    def _folded(self) -> Models:
        """The aggregation's next models."""
        models, known = self._models.close(), self._state["models"]
        wrong = None
        if not isinstance(models, Mapping):
            wrong = ""
        elif missing := [name for name in known if name not in models]:
            wrong = f" without {missing[0]!r}"
        elif extra := [name for name in models if name not in known]:
            wrong = f" with {extra[0]!r}, which models() lacks"
        if wrong is not None:
            raise UserError(
                f"the fold of {self._aggregation!r} closes with {in_words(models)}{wrong}; return the models by "
                'name, such as {"global": weights}'
            )
        self._check(models, f"the fold of {self._aggregation!r} closes with")
        if self._moved and all(
            torch.equal(w, models[m][name]) for m in known for name, w in known[m].items()
        ):
            warn(
                f"clients changed their weights, and the fold of {self._aggregation!r} closes with the models of "
                "before; check that its add uses the update, and that its close returns the result"
            )
        return models

    def _check(self, models: Models, source: str) -> None:
        """Check that models are finite and have the form of those before; the next round would blame clients."""
        for name, before in self._state["models"].items():
            after = models[name]
            for weight, tensor in before.items():
                found = after.get(weight) if isinstance(after, Mapping) else after
                place = f"for the weight {weight!r} of model {name!r}"
                form = (tensor.shape, tensor.dtype)
                if not isinstance(found, Tensor) or (found.shape, found.dtype) != form:
                    raise UserError(f"{source} {in_words(found)} {place}, which is {in_words(tensor)}")
                if found.is_floating_point() and not _finite(found):
                    reason = "values that are not finite, or that overflow,"
                    raise UserError(f"{source} {reason} {place}; the clients' updates were finite")
            if extra := after.keys() - before.keys():
                raise UserError(f"{source} the weight {min(extra)!r}, which model {name!r} does not have")


def _finite(tensor: Tensor) -> bool:
    precise = torch.promote_types(tensor.dtype, torch.float32)
    return math.isfinite(float(torch.linalg.vector_norm(tensor, dtype=precise)))


def _fold(component: Component, hook: str, opened: T, add: str) -> T:
    """Return the fold that a hook opened, if it is one."""
    if hasattr(opened, "add") and hasattr(opened, "close"):
        return opened
    raise UserError(
        f"{component.name!r}.{hook} returns {in_words(opened)}; return an object with {add} and close()"
    )


class _NeighbourFolds:
    """A component's fold at each client, over the slices of its neighbourhood; the state is by client id."""

    def __init__(
        self,
        component: Component,
        state: Tree,
        setting: Setting,
        round: int,
        near: Sequence[Collection[int]],
    ) -> None:
        slices = (
            component.fold(clone((state or {}).get(str(client))), setting, round)
            for client in range(len(near))
        )
        self._folds = {client: fold for client, fold in enumerate(slices) if fold is not None}
        self._near = near

    def add(self, client: int, piece: Tree) -> None:
        """Fold a client's slice in at each client that it reaches."""
        for reached, fold in self._folds.items():
            if client in self._near[reached]:
                fold.add(client, piece)

    def close(self) -> Tree:
        """Return each client's next slice."""
        return {str(client): fold.close() for client, fold in self._folds.items()}


def _with_geometry(fold: Fold) -> Fold:
    """Return the fold; wrap a fold that was written for 0.1, which reads the geometry from the update."""
    try:
        inspect.signature(fold.add).bind(0, {}, None)
    except TypeError:
        warn(
            f"{type(fold).__qualname__}.add(client, update) lacks its third argument, geometry, which was "
            'update["measure"] before; 0.3 will not call it without',
            OldCodeWarning,
        )
        return _OldFold(fold)
    return fold


class _OldFold:
    """A fold whose ``add`` has two arguments, as in 0.1."""

    def __init__(self, fold: Fold) -> None:
        self._add: Callable[[int, Mapping[str, object]], None] = fold.add  # type: ignore[assignment]
        self.close = fold.close

    def add(self, client: int, update: Update, geometry: UpdateGeometry) -> None:
        """Pass on the update with its geometry."""
        self._add(client, {**update, "measure": geometry})
