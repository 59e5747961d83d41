"""Client states on disk: one file per client and round, so that a state is used only if its round completed."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from atoll.components.messages import ClientState
from atoll.core.tree import load, save


class States(Protocol):
    """Interface of the client states, which are on this machine or at the sites."""

    def load(self, client: int, round: int) -> ClientState | None:
        """Load the state of a client after ``round``; None for round 0, or if the state is not accessible."""
        ...

    def prune(self, valid: Mapping[int, int]) -> None:
        """Allow states older than each client's valid one to be deleted."""
        ...

    def clear(self) -> None:
        """Delete all states, because the run starts from round 1."""
        ...


class ClientStates:
    """Folder of client states.

    A state is stored under the round that produced it. The server decides which round's state is valid, after it
    has accepted the update: the state of a lost or refused update is never read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, client: int, round: int) -> ClientState | None:
        """Load the state of a client after ``round``; None for round 0."""
        retained: ClientState | None = load(self._path(client, round)) if round else None
        return retained

    def save(self, client: int, round: int, retained: ClientState | None) -> None:
        """Save a state atomically."""
        save(self._path(client, round), retained)

    def prune(self, valid: Mapping[int, int]) -> None:
        """Delete the states older than each client's valid one."""
        for client, round in valid.items():
            for path in self._path(client, 0).parent.glob("*.safetensors"):
                if int(path.stem) < round:
                    path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Delete all states."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, client: int, round: int) -> Path:
        return self.folder / f"{client:06d}" / f"{round:06d}.safetensors"
