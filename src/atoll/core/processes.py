"""Reasons why processes that Atoll started ended."""

from __future__ import annotations

import signal


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
    likely = ", likely because memory ran out" if -exit_code == signal.SIGKILL else ""
    return f"was killed by signal {-exit_code}{names.get(-exit_code, '')}{likely}"
