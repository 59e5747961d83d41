"""Client states on disk: one file per client and round, so that a state is used only if its round completed."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from atoll.components.messages import ClientState
from atoll.core.errors import UserError
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

    Args:
        folder: The folder.
        resettable: Whether the run can be resumed with ``--reset-client``; errors then say so.
    """

    def __init__(self, folder: Path, resettable: bool = False) -> None:
        self.folder = folder
        self._resettable = resettable

    def load(self, client: int, round: int) -> ClientState | None:
        """Load the state of a client after ``round``; None for round 0.

        Raises:
            UserError: The state is missing or damaged.
        """
        if not round:
            return None
        try:
            retained: ClientState | None = load(self.path(client, round), label(client, round))
        except UserError as error:
            if not self._resettable:
                raise
            raise UserError(
                f"the state of client {client} cannot be read ({error}); restore it from a copy, or resume the run "
                f"with --reset-client {client}, which drops it"
            ) from None
        return retained

    def save(self, client: int, round: int, retained: ClientState | None) -> None:
        """Save a state atomically."""
        save(self.path(client, round), retained, label(client, round))

    def prune(self, valid: Mapping[int, int]) -> None:
        """Delete the states older than each client's valid one."""
        for client, round in valid.items():
            for path in self.path(client, 0).parent.glob("*.safetensors"):
                if path.stem.isdecimal() and int(path.stem) < round:
                    path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Delete all states."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def path(self, client: int, round: int) -> Path:
        """File of a client's state after a round."""
        return self.folder / f"{client:06d}" / f"{round:06d}.safetensors"


def label(client: int, round: int) -> str:
    """Label of the file of a client's state."""
    return f"state of client {client} after round {round}"
