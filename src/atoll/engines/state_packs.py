"""Packs of client states: files of many states each, so that many clients need few files.

A pack consists of the files of its states, one after another, and a table of their places. The table has a digest,
and so has each state, so a damaged state affects only one client. Packs never change: a superseded state stays
until the remaining states are written to a new pack. A damaged table affects only the states that are in no other
file; its pack is deleted once none of these is needed.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from atoll.core.digests import JSON, open_text, seal_text
from atoll.core.errors import UserError
from atoll.core.files import whole_file

_TAIL = 8  # bytes at the end of a pack: the size of its table
_CHUNK = 1 << 20

Key = tuple[int, int]  # client and round
Place = tuple[Path, int, int]  # file, first byte and number of bytes


class StatePacks:
    """The packs in a folder of client states, which several processes may read while one writes.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tables: dict[Path, dict[Key, Place]] = {}
        self._damaged: dict[Path, UserError] = {}

    def tables(self) -> dict[Path, dict[Key, Place]]:
        """Tables of all undamaged packs, from the oldest to the newest; known ones are not read again."""
        tables, damaged = dict[Path, dict[Key, Place]](), dict[Path, UserError]()
        for path in sorted(self.folder.glob("pack-*.states")):
            try:
                tables[path] = self._tables.get(path) or read_table(path)
            except FileNotFoundError:  # it was rewritten in the meantime
                continue
            except UserError as error:
                damaged[path] = error
        self._tables, self._damaged = tables, damaged
        return tables

    def read(self, client: int, round: int) -> bytes | None:
        """Read the bytes of a state's file; None if no pack has it.

        Raises:
            UserError: No other pack has it than, perhaps, a damaged one.
        """
        for _ in range(3):  # a pack may be rewritten after its table was read and before the state is read
            for table in reversed(list((self._tables or self.tables()).values())):
                if (client, round) in table:
                    with suppress(FileNotFoundError):
                        return read_place(table[client, round])
            self.tables()
        if self._damaged:
            raise next(iter(self._damaged.values()))
        return None

    def write(self, states: Mapping[Key, Path], superseded: Iterable[Key]) -> None:
        """Pack the files of states, together with the remaining states of packs of which less than half is left.

        Afterwards, the files and the old packs may be deleted, because the new pack is on the disk.

        Args:
            states: Files of states.
            superseded: States in packs that are no longer needed.
        """
        gone, places, emptied = set(superseded), dict[Key, Place](), []
        for path, table in self.tables().items():
            left = {key: place for key, place in table.items() if key not in gone}
            if 2 * len(left) < len(table):
                places |= left
                emptied.append(path)
        places |= {key: (path, 0, path.stat().st_size) for key, path in states.items()}
        if places:
            paths = (*self._tables, *self._damaged)
            newest = max((int(path.stem.removeprefix("pack-")) for path in paths), default=0)
            write_pack(self.folder / f"pack-{newest + 1:06d}.states", places)
        for path in emptied:
            path.unlink(missing_ok=True)

    def delete_damaged(self, valid: Mapping[int, int], files: Collection[Key]) -> None:
        """Delete the packs with a damaged table, unless one may contain the only copy of a valid state.

        Args:
            valid: The round of each client's valid state.
            files: The states that have files of their own.
        """
        tables = self.tables()
        if not self._damaged:  # the usual case; checking many valid states takes time
            return
        held = {*files, *(key for table in tables.values() for key in table)}
        if held.issuperset(valid.items()):
            for path in self._damaged:
                path.unlink(missing_ok=True)


def write_pack(path: Path, places: Mapping[Key, Place]) -> None:
    """Write a pack atomically, one state after another, with memory that does not depend on their number."""
    table: list[tuple[int, int, int]] = []
    with whole_file(path) as file:
        for (client, round), (source, start, size) in sorted(places.items()):
            with source.open("rb") as state:
                state.seek(start)
                left = size
                while chunk := state.read(min(left, _CHUNK)):
                    file.write(chunk)
                    left -= len(chunk)
            table.append((client, round, size))
        text = seal_text(json.dumps({"states": table}).encode(), JSON)
        file.write(text)
        file.write(len(text).to_bytes(_TAIL, "little"))


def read_table(path: Path) -> dict[Key, Place]:
    """Read the places of the states in a pack.

    Raises:
        UserError: The table is damaged.
        FileNotFoundError: There is no such pack.
    """
    try:
        with path.open("rb") as file:
            end = file.seek(-_TAIL, 2)
            size = int.from_bytes(file.read(_TAIL), "little")
            file.seek(end - size)
            text, sealed = open_text(file.read(size), JSON)
        if not sealed:
            raise ValueError("its table has no digest")
        found: dict[Key, Place] = {}
        start = 0
        for client, round, length in json.loads(text)["states"]:
            found[client, round] = (path, start, length)
            start += length
        if start != end - size:
            raise ValueError("its table does not fit its size")
    except FileNotFoundError:
        raise
    except (KeyError, OSError, OverflowError, TypeError, ValueError) as error:
        raise UserError(f"{path}, which holds states of many clients, is damaged: {error}") from None
    return found


def read_place(place: Place) -> bytes:
    """Read the bytes at a place."""
    path, start, size = place
    with path.open("rb") as file:
        file.seek(start)
        return file.read(size)
