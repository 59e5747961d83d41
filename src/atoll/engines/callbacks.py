"""Callbacks: what follows a run round by round, such as a progress bar, a log, or code of the user's."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, ClassVar

from atoll.core.errors import UserError
from atoll.core.process_state import settings_kept, streams_kept
from atoll.core.run_folder import Run

if TYPE_CHECKING:
    from atoll.engines.federation import Federation
    from atoll.engines.server import Record, Server

HOOKS = ("begin", "round", "step", "end")


class Callback:
    """Follows a run. Override the hooks that you need; an object of another class that has one of them will do.

    A run that needs prerequisite runs calls the hooks for each of these first; ``federation.recipe.name`` tells
    them apart. A resumed run calls `begin` again and `round` for the rounds that remain.

    Class attributes:
        guarded: Undo what the hooks draw from the process's random streams or set for all of PyTorch. That takes
            0.1 ms, which a `step` that does neither can save.

    Example:
        >>> import tempfile
        >>> import atoll
        >>> class Losses(atoll.Callback):
        ...     def round(self, record, line):
        ...         print(record.round, sorted(record.losses))
        >>> iid = {"kind": "iid", "clients": 2}
        >>> small = {"base": "digits-simclr", "data": {"limit": 60}, "partition": iid, "train": {"rounds": 1}}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = atoll.simulate(small, out=folder, callbacks=[Losses()])
        1 ['loss', 'simclr']
    """

    guarded: ClassVar[bool] = True

    def begin(self, federation: Federation, server: Server) -> None:
        """Called before the first round of this process; ``server.round`` rounds are complete."""

    def round(self, record: Record, line: dict[str, object]) -> None:
        """Called after a complete round, with its record and its line of the metrics."""

    def end(self, run: Run) -> None:
        """Called when the run has finished, and its results and its encoder are saved."""

    def step(self, images: int) -> None:
        """Called after a client has trained on a batch of ``images`` images; for progress bars."""


class Callbacks(Callback):
    """Several callbacks as one.

    Args:
        callbacks: Objects with at least one of the hooks of `Callback`.

    Raises:
        UserError: An object has no hook, or one that cannot be called as that of `Callback`.
    """

    def __init__(self, callbacks: Sequence[object]) -> None:
        for one in callbacks:
            if isinstance(one, type) or not any(_has_own(one, name) for name in HOOKS):
                raise UserError(
                    f"a callback is an object with at least one of the methods {', '.join(HOOKS)}, and "
                    f"{one!r} has none"
                    if not isinstance(one, type)
                    else f"a callback is an object, and {one.__name__} is a class; write {one.__name__}()"
                )
            for name in HOOKS:
                if _has_own(one, name):
                    _check_arguments(one, name)
        parts = (one._callbacks if isinstance(one, Callbacks) else (one,) for one in callbacks)
        self._callbacks: tuple[object, ...] = tuple(chain.from_iterable(parts))

    def begin(self, federation: Federation, server: Server) -> None:
        """Call each one's hook."""
        self._call("begin", federation, server)

    def round(self, record: Record, line: dict[str, object]) -> None:
        """Call each one's hook."""
        self._call("round", record, line)

    def end(self, run: Run) -> None:
        """Call each one's hook."""
        self._call("end", run)

    def step(self, images: int) -> None:
        """Call each one's hook."""
        self._call("step", images)

    def _call(self, name: str, *values: object) -> None:
        """Call a hook of each one that has it; what it draws or sets does not reach the training."""
        for one in self._callbacks:
            if not _has_own(one, name):
                continue
            hook = getattr(one, name)
            if getattr(one, "guarded", True):
                with streams_kept(), settings_kept():
                    hook(*values)
            else:
                hook(*values)


def _has_own(callback: object, name: str) -> bool:
    """Whether a callback has a hook other than the one of `Callback`, which does nothing."""
    hook = getattr(callback, name, None)
    return callable(hook) and getattr(hook, "__func__", None) is not getattr(Callback, name)


def _check_arguments(callback: object, name: str) -> None:
    """Check that a hook takes the arguments of `Callback`'s, before a run that would meet it hours later."""
    given = list(inspect.signature(getattr(Callback, name)).parameters)[1:]
    try:
        signature = inspect.signature(getattr(callback, name))
    except (TypeError, ValueError):  # a function in C, which does not say
        return
    try:
        signature.bind(*given)
    except TypeError as error:
        raise UserError(
            f"{type(callback).__name__}.{name}{signature} is a callback's hook and is called with "
            f"({', '.join(given)}): {error}"
        ) from None
