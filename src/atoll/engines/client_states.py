"""What clients keep, on disk: one file a client and round, so that a round counts only once it is complete."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from atoll.components.messages import ClientState
from atoll.core.tree import load, save


class States(Protocol):
    """What an engine's loop asks of client states, wherever they lie."""

    def load(self, client: int, round: int) -> ClientState | None:
        """The state that the client kept after ``round``; None after round 0, or where it cannot be had."""
        ...

    def prune(self, valid: Mapping[int, int]) -> None:
        """States that are older than these will not be asked for again."""
        ...

    def clear(self) -> None:
        """Delete all: the run starts from round 1."""
        ...


class ClientStates:
    """A folder of client states.

    A state is written under the round that made it. Which round's state is a client's valid one is the server's
    to say, after it has accepted the update: a state of a round that was lost, or refused, is never read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, client: int, round: int) -> ClientState | None:
        """The state that the client kept after ``round``; None after round 0."""
        retained: ClientState | None = load(self._path(client, round)) if round else None
        return retained

    def save(self, client: int, round: int, retained: ClientState | None) -> None:
        """Keep a state, whole or not at all."""
        save(self._path(client, round), retained)

    def prune(self, valid: Mapping[int, int]) -> None:
        """Delete the states that are older than each client's valid one."""
        for client, round in valid.items():
            for path in self._path(client, 0).parent.glob("*.safetensors"):
                if int(path.stem) < round:
                    path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Delete all."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, client: int, round: int) -> Path:
        return self.folder / f"{client:06d}" / f"{round:06d}.safetensors"
