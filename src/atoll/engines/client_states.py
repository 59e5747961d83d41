"""Client states on disk, by client and round, so that a state is used only if its round completed.

Each state is written to its own file. If many clients have states, those of a complete round are packed
(`atoll.engines.state_packs`).
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

from atoll.components.messages import ClientState
from atoll.core.errors import UserError
from atoll.core.files import sync_all
from atoll.core.tree import load, read, save
from atoll.engines.state_packs import Key, StatePacks

MOST_FILES = 1000  # states in separate files; if there are more, the valid ones are packed


class States(Protocol):
    """Interface of the client states, which are on this machine or at the sites."""

    def load(self, client: int, round: int) -> ClientState | None:
        """Load the state of a client after ``round``; None for round 0, or if the state is not accessible."""
        ...

    def sync(self, states: Iterable[Key]) -> None:
        """Wait until states are on the disk; until then, a power failure may lose them."""
        ...

    def prune(self, valid: Mapping[int, int]) -> None:
        """Allow states older than each client's valid one to be deleted."""
        ...

    def clear(self) -> None:
        """Delete all states, because the run starts from round 1."""
        ...


class ClientStates:
    """Folder of client states.

    A state is stored under the round that produced it. The server decides which round's state is valid once it has
    accepted the update; the state of a lost or refused update is never read.

    Args:
        folder: The folder.
        resettable: Whether the run can be resumed with ``--reset-client``; errors then say so.
        synced: Whether `save` waits until a state is on the disk; otherwise `sync` does, for many states at once.
    """

    def __init__(self, folder: Path, resettable: bool = False, synced: bool = True) -> None:
        self.folder = folder
        self._resettable, self._synced = resettable, synced
        self._packs = StatePacks(folder)

    def load(self, client: int, round: int) -> ClientState | None:
        """Load the state of a client after ``round``; None for round 0.

        Raises:
            UserError: The state is missing or damaged.
        """
        if not round:
            return None
        try:
            retained = self._load(client, round)
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
        path = self.path(client, round)
        write = partial(save, path, retained, label(client, round), synced=self._synced)
        try:
            write()
        except UserError:
            if path.parent.exists():
                raise
            write()  # `_pack` may have removed the empty folder at this moment

    def sync(self, states: Iterable[Key]) -> None:
        """Wait until the files of states are on the disk."""
        files = [] if self._synced else [self.path(client, round) for client, round in states]
        if files:
            sync_all([*files, *(file.parent for file in files), self.folder, self.folder.parent])

    def _load(self, client: int, round: int) -> ClientState | None:
        path = self.path(client, round)
        retained: ClientState | None
        try:  # without `is_file` first: the file may be packed between the check and the read
            data, place = path.read_bytes(), str(path)
        except OSError:
            packed = self._packs.read(client, round)
            if packed is None:
                retained = load(path, label(client, round))  # raises the error that describes the file
                return retained
            data, place = packed, f"the state in {self.folder}"
        retained = read(data, place, label(client, round))
        return retained

    def prune(self, valid: Mapping[int, int]) -> None:
        """Delete the states older than each client's valid one, and pack the valid ones if they are many."""
        kept: dict[Key, Path] = {}
        for path in self.folder.glob("*/*.safetensors"):
            client, round = path.parent.name, path.stem
            if not (client.isdecimal() and round.isdecimal()):
                continue
            newest = valid.get(int(client), 0)
            if int(round) < newest:
                path.unlink(missing_ok=True)
            elif int(round) == newest:
                kept[int(client), int(round)] = path
        if len(kept) > MOST_FILES:
            self._pack(kept, valid)
        self._packs.delete_damaged(valid, kept)

    def _pack(self, files: Mapping[Key, Path], valid: Mapping[int, int]) -> None:
        packed = (key for table in self._packs.tables().values() for key in table)
        self._packs.write(files, [(k, round) for k, round in packed if round < valid.get(k, 0)])
        for path in files.values():
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # the folder contains a newer state
                path.parent.rmdir()

    def clear(self) -> None:
        """Delete all states."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def path(self, client: int, round: int) -> Path:
        """File of a client's state after a round."""
        return self.folder / f"{client:06d}" / f"{round:06d}.safetensors"


def label(client: int, round: int) -> str:
    """Label of the file of a client's state."""
    return f"state of client {client} after round {round}"
