"""Processes that train or decode: how they start, and why they ended."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # on Windows there is no ForkServerContext
    from multiprocessing.context import ForkServerContext, SpawnContext


in_command = False  # whether this process is one of the command's, and not of a program that uses Atoll


def num_cores() -> int:
    """Return the number of cores that this process may use, which may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def process_context(*modules: str) -> ForkServerContext | SpawnContext:
    """Return the context in which processes that train or decode start.

    On Linux, they are forks of Python's fork server, a process that imports PyTorch and Atoll once for all of them.
    A fork starts in a fraction of a second and shares the memory of what was imported. The fork server may be
    forked, because it computes nothing and uses no GPU. It starts in the background at the first call of this
    function, and ends with this process; forks have the environment variables of that time.

    On other systems, every process imports separately, because system libraries may fail in forks.

    Args:
        modules: Further modules that the processes will need; the first call counts.
    """
    main = sys.modules["__main__"]
    if getattr(main, "__file__", None) == "<stdin>":  # or a process would run a script of that name
        del main.__file__
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["atoll.engines.preload", *modules])
    with interrupts_blocked():
        try:
            forkserver.ensure_running()
        except ChildProcessError:  # this process is itself a fork, and the server belongs to its parent
            vars(forkserver)["_forkserver"]._forkserver_pid = None
            forkserver.ensure_running()
    return context


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Block Ctrl-C and the signal of a closed terminal for processes that start within the context.

    The processes inherit the blocking, so that no signal can end them before they set how to handle it. Windows has
    no signal blocking.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # otherwise the first process start does so, and unblocks interrupts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def why_ended(exit_code: int | None) -> str:
    """Say why a process ended, as the end of a sentence.

    Args:
        exit_code: As ``multiprocessing.Process.exitcode``: the negative number of the signal that killed it, or the
            code with which it ended; None if it is not known.

    Example:
        >>> from atoll.core.processes import why_ended
        >>> why_ended(-9)
        'was killed by signal 9 (SIGKILL), likely because memory ran out'
        >>> why_ended(-11), why_ended(3)
        ('was killed by signal 11 (SIGSEGV)', 'ended with exit code 3; what it wrote to the terminal may say why')
    """
    if exit_code is None:
        return "closed its connection"
    if exit_code >= 0:
        return f"ended with exit code {exit_code}; what it wrote to the terminal may say why"
    names = {one.value: f" ({one.name})" for one in signal.Signals}
    name = names.get(-exit_code, "")
    likely = ", likely because memory ran out" if "SIGKILL" in name else ""
    return f"was killed by signal {-exit_code}{name}{likely}"
