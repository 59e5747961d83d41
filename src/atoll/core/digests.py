"""Digests: every file of a run that is read again contains a checksum of its own bytes.

The digest is in the file, so that both are replaced in one step: at the start of a JSON object, of each line of
metrics and of a TOML file, and in the metadata of a safetensors file. It covers all bytes of the file except its
own digits.

The digest is a CRC-32: it finds every flipped bit and every burst of up to 32 bits, misses other damage in one of 4
billion cases, and costs less than copying the bytes in memory. It protects from damage, not from forgery.

Files of Atoll 0.1 have no digest and cannot be verified. No single damaged byte makes a file with a digest look
like one without.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

DIGITS = 8
MISMATCH = "its digest does not match its content"


class DamagedError(ValueError):
    """Error for bytes that differ from those that were written; the message is a clause with the reason."""


@dataclass(frozen=True)
class TextForm:
    """Place of the digest in a kind of text file: at its start.

    Attributes:
        before: Bytes before the digits.
        after: Bytes after the digits.
        opening: Start of the text without a digest, which these bytes replace.
    """

    before: bytes
    after: bytes
    opening: bytes


JSON = TextForm(b'{"digest": "', b'", ', b"{")
TOML = TextForm(b"# digest ", b"\n", b"")


def is_sealed_text(start: bytes) -> bool:
    """Whether the first bytes of a text file, or of a line of metrics, show a digest."""
    return start.startswith((JSON.before, TOML.before))


def checksum(*pieces: bytes | memoryview) -> bytes:
    """Compute the digits of a digest over pieces of bytes."""
    crc = 0
    for piece in pieces:
        crc = zlib.crc32(piece, crc)
    return f"{crc:0{DIGITS}x}".encode()


def seal_text(body: bytes, form: TextForm) -> bytes:
    """Add the digest to a text.

    Example:
        >>> from atoll.core.digests import JSON, open_text, seal_text
        >>> seal_text(b'{"round": 3}', JSON)
        b'{"digest": "ebc261a3", "round": 3}'
        >>> open_text(seal_text(b'{"round": 3}', JSON), JSON)
        (b'{"round": 3}', True)
    """
    return form.before + checksum(body) + form.after + body.removeprefix(form.opening)


def open_text(data: bytes, form: TextForm) -> tuple[bytes, bool]:
    """Verify a text and remove its digest.

    Returns:
        The text without its digest, and whether it had one.

    Raises:
        DamagedError: The digest does not match.
    """
    head = data[: len(form.before)]
    alike = sum(a == b for a, b in zip(head, form.before, strict=False))
    if 2 * alike <= len(head):
        return data, False
    start = len(form.before)
    end = start + DIGITS + len(form.after)
    body = form.opening + data[end:]
    if data[:end] != form.before + checksum(body) + form.after:
        raise DamagedError(MISMATCH)
    return body, True


def seal_at(pieces: Sequence[bytes | memoryview], marker: bytes) -> list[bytes | memoryview]:
    """Put the digest into a file whose first piece has `DIGITS` placeholders after the first ``marker``.

    Returns:
        The pieces of the sealed file, without a copy of the others.
    """
    first, *others = pieces
    first = bytes(first)
    before, after = _around(first, first.index(marker) + len(marker))
    return [before, checksum(before, after, *others), after, *others]


def verify_at(data: bytes, marker: bytes) -> None:
    """Verify bytes that `seal_at` made.

    Raises:
        DamagedError: The digest does not match.
    """
    at = data.index(marker) + len(marker)
    if data[at : at + DIGITS] != checksum(*_around(data, at)):
        raise DamagedError(MISMATCH)


def _around(data: bytes, at: int) -> tuple[memoryview, memoryview]:
    view = memoryview(data)
    return view[:at], view[at + DIGITS :]
