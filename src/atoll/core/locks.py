"""Locks between processes on open files, by the operating system's ``flock``."""

from __future__ import annotations

from functools import cache
from typing import IO, Any

from atoll.core.errors import warn


def lock(file: IO[Any], wait: bool = True) -> None:
    """Lock an open file until it is closed; on a system without such locks, only warn.

    Args:
        file: The file.
        wait: Whether to wait for another process that has locked it.

    Raises:
        BlockingIOError: Another process has locked the file, and ``wait`` is false.

    Example:
        >>> from atoll.core.locks import lock
        >>> with open("lock", "w") as file, open("lock") as again:
        ...     lock(file)
        ...     try:
        ...         lock(again, wait=False)
        ...     except BlockingIOError:
        ...         print("locked")
        locked
    """
    try:
        import fcntl  # not on Windows
    except ImportError:
        _warn()
        return
    fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)


@cache
def _warn() -> None:
    warn(
        "this system has no file locks (Python's fcntl), so nothing stops two processes from using the same "
        "folder; give each its own",
        UserWarning,
    )
