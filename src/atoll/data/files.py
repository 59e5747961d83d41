"""Files: where the cache lies, files that are written whole or not at all, and hashes of what files hold."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from atoll.errors import UserError


def cache_folder() -> Path:
    """``$ATOLL_CACHE``, by default ``~/.cache/atoll``."""
    return Path(os.environ.get("ATOLL_CACHE") or "~/.cache/atoll").expanduser()


def content_digest(files: Sequence[tuple[str, Path]]) -> str:
    """Hash of files' names and bytes, whatever machine and folder they are on.

    The answer is remembered by the files' sizes and times, so that a large source is not read again at every
    start.

    Raises:
        UserError: A file cannot be read.
    """
    try:
        stats = [path.stat() for _, path in files]
        places = [
            f"{name}\0{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}"
            for (name, path), stat in zip(files, stats, strict=True)
        ]
        memo = cache_folder() / "digests" / hash_bytes("\n".join(places).encode())
        with contextlib.suppress(OSError, ValueError):
            known = memo.read_text()
            if len(known) == 32:
                return known
        digest = hashlib.blake2b(digest_size=16)
        for (name, path), stat in zip(files, stats, strict=True):
            digest.update(f"{name}\0{stat.st_size}\0".encode())
            with path.open("rb") as file:
                while chunk := file.read(1 << 20):
                    digest.update(chunk)
    except OSError as error:
        raise UserError(f"cannot read {error.filename}: {error.strerror or error}") from error
    write_text(memo, digest.hexdigest())
    return digest.hexdigest()


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A file that appears under its name only when the block ends well; otherwise nothing is left.

    Raises:
        UserError: It cannot be written, because the disk is full for example.
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=".", suffix=".part", dir=path.parent)
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        temporary = None
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = "the disk is full" if full else error.strerror or str(error)
        raise UserError(
            f"cannot write the image cache in {path.parent}: {reason}; "
            "make room or point ATOLL_CACHE at another folder"
        ) from error
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def write_text(path: Path, text: str) -> None:
    """`whole_file` of a text."""
    with whole_file(path) as file:
        file.write(text.encode())


def hash_bytes(data: bytes) -> str:
    """The hash behind every fingerprint."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def read_bytes(path: Path) -> bytes:
    """A file's bytes, or a sentence that says why not."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
