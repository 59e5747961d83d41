"""A round at the server: updates are folded into the models and the components' slices, then a step is taken."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from atoll.components.base import (
    Aggregation,
    Component,
    Fold,
    ServerState,
    ServerStep,
    Setting,
    SliceFold,
    Update,
    UpdateGeometry,
)


class RoundFold:
    """A round's fold: models by the aggregation, slices by their components, then the server step."""

    def __init__(
        self,
        components: Sequence[Component],
        aggregation: Aggregation,
        server: ServerStep,
        state: ServerState,
        setting: Setting,
        round: int,
        scratch: Path | None,
    ) -> None:
        self._server = server
        self._state = state
        self._setting = setting
        self._models = _with_geometry(aggregation.open(state["models"], setting, round, scratch))
        self._slices: dict[str, SliceFold] = {}
        for component in components:
            fold = component.fold(state["parts"].get(component.name), setting, round)
            if fold is not None:
                self._slices[component.name] = fold

    def add(self, client: int, update: Update, geometry: UpdateGeometry) -> None:
        """Fold in one client's update; clients come in id order, and the update may be reused after."""
        self._models.add(client, update, geometry)
        for name, fold in self._slices.items():
            fold.add(client, update["parts"].get(name))

    def close(self) -> ServerState:
        """The server's next state."""
        models = self._models.close()
        slices = dict(self._state["parts"])
        slices.update({name: fold.close() for name, fold in self._slices.items()})
        server = self._server
        steps = dict(slices.get(server.name) or {})
        for name, folded in models.items():
            current = self._state["models"][name]
            if folded is not current:  # a cluster that nobody chose takes no step
                steps[name], models[name] = server.step(steps.get(name), current, folded, self._setting)
        if any(value is not None for value in steps.values()):
            slices[server.name] = steps
        return {"models": models, "parts": slices}


def _with_geometry(fold: Fold) -> Fold:
    """The fold; one that was written for 0.1 gets an update's geometry inside the update."""
    try:
        inspect.signature(fold.add).bind(0, {}, None)
    except TypeError:
        warnings.warn(
            f"{type(fold).__qualname__}.add(client, update) lacks its third argument, geometry, which was "
            'update["measure"] before; 0.3 will not call it without',
            DeprecationWarning,
            stacklevel=2,
        )
        return _OldFold(fold)
    return fold


class _OldFold:
    """A fold whose ``add`` has two arguments, as in 0.1."""

    def __init__(self, fold: Fold) -> None:
        self._add: Callable[[int, Mapping[str, object]], None] = fold.add  # type: ignore[assignment]
        self.close = fold.close

    def add(self, client: int, update: Update, geometry: UpdateGeometry) -> None:
        """Hand on the update with its geometry."""
        self._add(client, {**update, "measure": geometry})
