"""The command as a process: signals, warnings and errors become sentences on the standard error."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from atoll.core.errors import OldCodeWarning
from atoll.core.text import clean

SIGNALS = ("SIGTERM", "SIGHUP")  # a stop by the system, a closed terminal


_ASCII = str.maketrans("−–—×·’…", "---x.'.")  # of the same width, for tables


def _nearest(error: UnicodeError) -> tuple[str, int]:
    """Replace characters by the nearest ASCII text; a number must not lose its minus sign."""
    assert isinstance(error, UnicodeEncodeError)  # noqa: S101
    nearest = error.object[error.start : error.end].translate(_ASCII)
    return "".join(char if char.isascii() else "?" for char in nearest), error.end


def accept_any_text() -> None:
    """Make the standard output accept any text: replace characters that it lacks; drop all if it is closed."""
    if sys.stdout is None:
        sys.stdout = io.TextIOWrapper(io.BytesIO())
    elif isinstance(sys.stdout, io.TextIOWrapper):
        codecs.register_error("atoll.nearest", _nearest)
        sys.stdout.reconfigure(errors="atoll.nearest")


def drop_output() -> None:
    """Discard text that is still to be flushed, because the standard output cannot take it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Stopped(KeyboardInterrupt):
    """A signal that stops the command as Ctrl-C does."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number


def say(sentence: str) -> None:
    """Print a sentence on the standard error, without control characters."""
    lines = (clean(line) for line in sentence.splitlines())
    print("atoll: " + "\n".join(lines), file=sys.stderr)  # noqa: T201


@contextlib.contextmanager
def signals_as_interrupts() -> Iterator[None]:
    """Let SIGTERM and SIGHUP stop the block as Ctrl-C does; restore the earlier handlers afterwards.

    A signal that the process ignores stays ignored: ``nohup atoll …`` outlives its terminal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(number)

    numbers = [getattr(signal, name) for name in SIGNALS if hasattr(signal, name)]
    heeded = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def warnings_as_sentences() -> Iterator[None]:
    """Show Atoll's warnings like its errors, without the source line of the warning."""
    before = warnings.formatwarning

    def sentence(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if category in (UserWarning, OldCodeWarning):
            return f"atoll: {clean(str(message))}\n"
        return before(message, category, filename, lineno, line)

    warnings.formatwarning = sentence
    try:
        with warnings.catch_warnings():
            if not sys.warnoptions:
                warnings.simplefilter("default", OldCodeWarning)  # Python hides those of imported modules
            yield
    finally:
        warnings.formatwarning = before


def start_forking(recipe: str | Path, settings: Sequence[str]) -> None:
    """Start the fork server, if the recipe has workers, to import PyTorch while this process does."""
    from atoll.core.config import over, read_settings
    from atoll.core.processes import process_context
    from atoll.recipe.table import further_imports, read_table

    table = over(read_table(recipe), read_settings(settings))
    engine = table.get("engine", {})
    if engine.get("workers", 1) not in (1, "auto") or engine.get("devices") or engine.get("decoders"):
        process_context(*further_imports(table))
