"""Folds: the server processes clients' updates one at a time, in the order of client ids."""

from __future__ import annotations

from typing import Protocol

from atoll.components.messages import Models, Update, UpdateGeometry
from atoll.core.tree import Tree


class Fold(Protocol):
    """A round's aggregation."""

    def add(self, client: int, update: Update, geometry: UpdateGeometry, /) -> None:
        """Fold in one client's update, which the fold may keep (the weights only with `keeps_updates`).

        Args:
            client: The client's id.
            update: The update, accepted by the update checks.
            geometry: Difference between the update's weights and the model from which they started.
        """
        ...

    def close(self) -> Models:
        """Return the server's next models."""
        ...


class SliceFold(Protocol):
    """A round's slices of one component."""

    def add(self, client: int, piece: Tree, /) -> None:
        """Fold in one client's slice; None if the client sent none."""
        ...

    def close(self) -> Tree:
        """Return the component's next slice of the server state."""
        ...
