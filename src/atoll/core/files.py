"""Files: location of the cache, atomic writes, and hashes of file contents."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import IO

from atoll.core.digests import checksum
from atoll.core.errors import UserError
from atoll.core.locks import lock
from atoll.core.text import type_words

SECONDS_UNTIL_LOCKED = 60  # a writer creates its temporary file, then locks it
_SYNC_THREADS = 16
_DEVICES = Path("/dev")  # whose stdout may lead to a file


def cache_folder() -> Path:
    """Path of the cache: ``$ATOLL_CACHE``, by default ``~/.cache/atoll``.

    Raises:
        UserError: The user has no home folder, as that of a container may not.
    """
    return expand_home(
        os.environ.get("ATOLL_CACHE") or "~/.cache/atoll", "set ATOLL_CACHE to a folder for the cache"
    )


def expand_home(path: Path | str, remedy: str = "write the whole path") -> Path:
    """Put the user's home folder in place of the ``~`` with which a path begins.

    Args:
        path: The path; one without ``~`` stays as it is.
        remedy: What to do without a home folder.

    Raises:
        UserError: The user has no home folder, as that of a container may not.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(f"there is no home folder for {path}; {remedy}") from None


def to_path(value: object, what: str) -> Path:
    """Convert a path that Python code gives.

    Args:
        value: The path: a text, a `Path`, or another object with a path, such as a run.
        what: Name of the parameter, for the message.

    Raises:
        UserError: It is something else.
    """
    if not isinstance(value, str | os.PathLike) or not isinstance(os.fspath(value), str):
        raise UserError(f"{what} is {type_words(value)}; give a path, as a text or a pathlib.Path")
    return Path(value)


def is_file(path: Path) -> bool:
    """Whether the file exists. Errors that prevent the answer are raised, as by `Path.is_file` until Python 3.13.

    Raises:
        OSError: A folder above it cannot be read, or the path is too long.
    """
    try:
        return S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def refuse_special(path: Path, mode: int | None = None) -> Path:
    """Return the path of a file, unless it is a pipe, a socket or a device, which may never end.

    Args:
        path: The path; one that does not exist is returned, too.
        mode: The file's mode, if it is known.

    Raises:
        UserError: It is a pipe, a socket or a device.
    """
    try:
        mode = path.stat().st_mode if mode is None else mode
    except OSError:  # its reader says why
        return path
    if not S_ISREG(mode) and not S_ISDIR(mode):
        raise UserError(f"{path} is a pipe, a socket or a device, and not a regular file; remove it")
    return path


def unreadable(path: Path | str, error: OSError) -> UserError:
    """Make the error for a file that cannot be read; a link whose target does not exist is named as one."""
    why = error.strerror or str(error)
    if isinstance(error, FileNotFoundError) and os.path.islink(path):
        why = f"it is a link to {os.readlink(path)}, which does not exist; restore that file, or remove the link"
    return UserError(f"cannot read {path}: {why}")


def data_folder() -> Path | None:
    """Folder in which images are searched for if they are not found elsewhere, ``$ATOLL_DATA``; None if not set."""
    folder = os.environ.get("ATOLL_DATA")
    return expand_home(folder) if folder else None


def content_digest(files: Sequence[tuple[str, Path]]) -> str:
    """Hash of the names and bytes of files, independent of the machine and the folder.

    The cache stores the digest under the files' paths, sizes and modification times, so that a large source is not
    read again at every start.

    Args:
        files: Name and path of each file.

    Raises:
        UserError: A file cannot be read.
    """
    try:
        stats = [path.stat() for _, path in files]
        for (_, path), stat in zip(files, stats, strict=True):
            refuse_special(path, stat.st_mode)
        places = [os.path.split(path) for _, path in files]
        resolved = {folder: os.path.realpath(folder) for folder in {folder for folder, _ in places}}
        keys = [
            # The modification time of the content can be set, as by archives; that of the entry (ctime) cannot.
            f"{name}\0{resolved[folder]}/{entry}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ctime_ns}"
            for (name, _), (folder, entry), stat in zip(files, places, stats, strict=True)
        ]
        # A file's name may contain bytes that are not text, which Python keeps as surrogates.
        memo = cache_folder() / "digests" / hash_bytes("\n".join(keys).encode(errors="surrogateescape"))
        with contextlib.suppress(OSError, ValueError):
            known = memo.read_bytes()
            if known[32:] == checksum(known[:32]):
                return known[:32].decode()
        digest = hashlib.blake2b(digest_size=16)
        for (name, path), stat in zip(files, stats, strict=True):
            digest.update(f"{name}\0{stat.st_size}\0".encode(errors="surrogateescape"))
            with path.open("rb") as file:
                while chunk := file.read(1 << 20):
                    digest.update(chunk)
    except OSError as error:
        raise unreadable(error.filename, error) from error
    found = digest.hexdigest().encode()
    write_whole(memo, found + checksum(found), shared=True)
    return digest.hexdigest()


@contextlib.contextmanager
def whole_file(path: Path, shared: bool = False, synced: bool = True) -> Iterator[IO[bytes]]:
    """Write a file atomically: at any instant, readers see either the complete old file or the complete new one.

    The file appears under its name only if the block ends without an exception; otherwise no partial file remains.
    Once the block has ended, a power failure does not bring the old file back, unless ``synced`` is false.
    A device or a pipe, such as ``/dev/stdout``, is written and not replaced.

    Args:
        path: Path of the file; missing folders are created.
        shared: Whether several processes may write the file at the same time; each then uses a separate
            temporary file.
        synced: Whether to wait until the file is on the disk. Many files are synced faster together, by `sync_all`.

    Raises:
        UserError: The disk is full or the folder cannot be written.
    """
    if not path.name or path.is_dir():
        raise UserError(f"{path} is a folder; name a file")
    if path.exists() and (not path.is_file() or path.parent == _DEVICES):
        try:
            with path.open("ab") as file:
                yield file
        except OSError as error:
            raise UserError(disk_sentence(path, error)) from None
        return
    part = path.with_name(f".{path.name}.part")
    try:
        new = list(itertools.takewhile(lambda folder: not folder.exists(), path.parents))
        path.parent.mkdir(parents=True, exist_ok=True)
        if shared:
            descriptor, name = tempfile.mkstemp(prefix=".", suffix=".part", dir=path.parent)
            os.close(descriptor)
            part = Path(name)
        with part.open("wb") as file:
            if shared:
                lock(file)  # so that `clear_parts` does not delete it
            yield file
            if synced:
                sync(file)
        part.replace(path)
        for folder in dict.fromkeys([path.parent, *(made.parent for made in new)]) if synced else ():
            _sync_names(folder)
    except BaseException as error:
        with contextlib.suppress(OSError):
            part.unlink()
        if isinstance(error, OSError):
            raise UserError(disk_sentence(path, error)) from None
        raise


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """Within the block, new files and folders are readable only by their owner."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def clear_parts(folder: Path) -> None:
    """Delete the temporary files in a shared folder whose writers were killed."""
    for part in folder.glob(".*.part"):
        with contextlib.suppress(OSError), part.open("rb") as file:
            lock(file, wait=False)  # fails while its writer runs
            if time.time() - part.stat().st_mtime > SECONDS_UNTIL_LOCKED:
                part.unlink()


def write_whole(
    path: Path, data: bytes | Sequence[bytes | memoryview], shared: bool = False, synced: bool = True
) -> None:
    """Write bytes, or pieces of bytes, to a file atomically; see `whole_file`."""
    with whole_file(path, shared, synced) as file:
        file.writelines([data] if isinstance(data, bytes) else data)


def append(path: Path, data: bytes) -> None:
    """Append to a file; like a whole file, the data are on the disk when this returns."""
    with path.open("ab") as file:
        file.write(data)
        sync(file)
    _sync_names(path.parent)


def sync(file: IO[bytes]) -> None:
    """Wait until written data are on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_all(paths: Collection[Path]) -> None:
    """Wait until files, and the names in folders, are on the disk.

    Threads sync many files at once, because a file system commits simultaneous requests together.

    Raises:
        UserError: The disk is full, or a file is missing.
    """
    with ThreadPoolExecutor(_SYNC_THREADS) as pool:
        list(pool.map(_sync_path, paths))


def _sync_path(path: Path) -> None:
    try:
        if path.is_dir():
            _sync_names(path)
            return
        with path.open("r+b") as file:
            sync(file)
    except OSError as error:
        raise UserError(disk_sentence(path, error)) from None


def hash_bytes(data: bytes) -> str:
    """Hash of bytes; all fingerprints use it."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def read_bytes(path: Path) -> bytes:
    """Read a file's bytes.

    Raises:
        UserError: The file cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error


def _sync_names(folder: Path) -> None:
    """Sync a folder's list of names to the disk, on systems that can open and sync folders."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EBADF, errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def is_full_disk(error: OSError) -> bool:
    """Whether the disk is full, or the user's share of it."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def disk_sentence(path: Path, error: OSError) -> str:
    """Error message for a file that cannot be written."""
    cached = path.is_relative_to(cache_folder())
    if is_full_disk(error):
        remedy = "free some space or point ATOLL_CACHE at another folder" if cached else "free some space"
        return (
            f"the disk is full: {path} could not be written; {remedy}, then run the command again (of a run, with "
            "--resume)"
        )
    remedy = "; point ATOLL_CACHE at another folder" if cached else ""
    return f"cannot write {path}: {error.strerror}{remedy}"
