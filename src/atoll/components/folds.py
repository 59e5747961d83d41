"""How the server takes what clients return: one at a time, in client-id order."""

from __future__ import annotations

from typing import Protocol

from atoll.components.messages import Models, Update, UpdateGeometry
from atoll.core.tree import Tree


class Fold(Protocol):
    """A round's aggregation."""

    def add(self, client: int, update: Update, geometry: UpdateGeometry, /) -> None:
        """Fold in one client's update, which may be reused afterwards.

        Args:
            client: id.
            update: as the update checks have accepted it.
            geometry: how its weights differ from the model that they started from, as the checks measured it.
        """
        ...

    def close(self) -> Models:
        """The server's next models."""
        ...


class SliceFold(Protocol):
    """A round's slices of one component."""

    def add(self, client: int, piece: Tree, /) -> None:
        """Fold in one client's slice; None where it sent none."""
        ...

    def close(self) -> Tree:
        """The component's next slice of server state."""
        ...
