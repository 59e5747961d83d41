"""Audit log: an append-only file of JSON lines, each with a hash over itself and all lines before it.

A line is ``{"hash": "…", "at": "…", "event": "…", …}``. Its hash is the SHA-256 of the hash before it and of its
own text without the hash, so the next line reveals a line that was changed, removed, inserted or moved. The chain
alone cannot reveal that the end was cut off, or that the whole file was rewritten: for that, somebody else must
have kept a later hash (a coordinator keeps its sites' hashes).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from atoll.core.errors import UserError
from atoll.core.files import disk_sentence, sync
from atoll.core.locks import lock

FILE = "audit.jsonl"
START = "0" * 64  # the hash before the first line
_HASH = "[0-9a-f]{64}"
_LINE = re.compile(rb'\{"hash": "(%b)", (.*\})' % _HASH.encode())
_BLOCK = 2**16


def is_hash(text: str) -> bool:
    """Whether a text has the form of a line's hash."""
    return re.fullmatch(_HASH, text) is not None


@dataclass(frozen=True)
class Entry:
    """A line of an audit log.

    Attributes:
        hash: Its hash.
        fields: All other fields: ``at`` (UTC), ``event``, and those of the event.
    """

    hash: str
    fields: dict[str, object]


class AuditLog:
    """The audit log in a file; processes may write to it at the same time.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from atoll.core.audit_log import AuditLog
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     log = AuditLog(Path(folder) / "audit.jsonl")
        ...     head = log.append("joined", site="north")
        ...     [(entry.hash == head, entry.fields["site"]) for entry in log.entries()]
        [(True, 'north')]
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the log within the block, to append entries that depend on earlier ones; other holders wait.

        Raises:
            UserError: The lock's file cannot be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = self.path.with_suffix(".lock").open("w")
        except OSError as error:
            raise UserError(disk_sentence(self.path, error)) from None
        with file:
            lock(file)
            yield

    def append(self, event: str, **fields: object) -> str:
        """Append a line and return its hash; the line is on the disk when this returns.

        A line that a power failure cut off is removed, and the new line says how many bytes it had.

        Raises:
            UserError: The file cannot be written, or its last line is damaged.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            with os.fdopen(descriptor, "r+b") as file:
                lock(file)
                last, torn = _last_line(file)
                if torn:
                    file.truncate(file.seek(0, os.SEEK_END) - torn)
                    fields["removed_incomplete_bytes"] = torn
                found = _LINE.fullmatch(last)
                if last and not found:
                    raise self._damaged("its last line is no entry")
                before = found.group(1).decode() if found else START
                body = json.dumps({"at": datetime.now(UTC).isoformat(), "event": event, **fields})
                head = _hash(before, body.encode())
                file.write(f'{{"hash": "{head}", {body[1:]}\n'.encode())
                sync(file)
        except OSError as error:
            raise UserError(disk_sentence(self.path, error)) from None
        return head

    def entries(self, incomplete: bool = False) -> Iterator[Entry]:
        """Yield all entries, each verified before it is yielded; none if there is no file.

        Args:
            incomplete: Whether to leave out an incomplete last line, which `append` removes.

        Raises:
            UserError: A line was changed, or lines are missing or in another order.
        """
        if not self.path.exists():
            return
        before = START
        try:
            with self.path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    found = _LINE.fullmatch(line.removesuffix(b"\n"))
                    if not line.endswith(b"\n"):
                        if incomplete:
                            return
                        raise self._damaged(f"line {number} is incomplete, as a power failure leaves it")
                    if not found or _hash(before, b"{" + found.group(2)) != found.group(1).decode():
                        raise self._damaged(f"line {number} does not continue the lines before it")
                    before = found.group(1).decode()
                    yield Entry(before, self._fields(found.group(2), number))
        except OSError as error:
            raise UserError(f"cannot read {self.path}: {error.strerror}") from None

    def _fields(self, body: bytes, number: int) -> dict[str, object]:
        """Parse the text after a hash; it may be anything, because anybody can compute a hash."""
        try:
            fields: dict[str, object] = json.loads(b"{" + body)
        except (ValueError, RecursionError):
            raise self._damaged(f"line {number} is no entry") from None
        if not all(isinstance(fields.get(key), str) for key in ("at", "event")):
            raise self._damaged(f"line {number} is no entry")
        return fields

    def _damaged(self, why: str) -> UserError:
        return UserError(f"{self.path} was changed or is damaged: {why}; compare it with a copy")


def _hash(before: str, body: bytes) -> str:
    return hashlib.sha256(before.encode() + body).hexdigest()


def _last_line(file: IO[bytes]) -> tuple[bytes, int]:
    """The last complete line, and the number of bytes after it."""
    place, data = file.seek(0, os.SEEK_END), b""
    while place and data.count(b"\n") < 2:
        size = min(_BLOCK, place)
        place = file.seek(place - size)
        data = file.read(size) + data
    *lines, torn = data.split(b"\n")
    return (lines[-1] if lines else b""), len(torn)
