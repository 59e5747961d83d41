"""Callbacks: objects that follow a run round by round, such as a progress bar, a log, or the user's code."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, ClassVar

from atoll.core.errors import UserError
from atoll.core.process_state import process_kept
from atoll.core.run_folder import Run

if TYPE_CHECKING:
    from atoll.engines.federation import Federation
    from atoll.engines.record import Record
    from atoll.engines.server import Server

HOOKS = ("begin", "round", "step", "end")


class Callback:
    """Follows a run. Override the hooks that you need. An object of any class with at least one of them works too.

    If a run needs prerequisite runs, the hooks are first called for each of these; ``federation.recipe.name`` tells
    the runs apart. A resumed run calls `begin` again, and `round` for the remaining rounds.

    Class attributes:
        guarded: Undo what the hooks draw from the process's random streams and what they set for all of PyTorch.
            This takes 0.1 ms per call; set it to False if your `step` does neither.

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
        """Called when the run has finished and its results and encoder are saved."""

    def step(self, images: int) -> None:
        """Called after a client has trained on a batch of ``images`` images; for progress bars."""


class Callbacks(Callback):
    """Several callbacks as one.

    Args:
        callbacks: Objects with at least one of the hooks of `Callback`.

    Raises:
        UserError: An object has no hook, or a hook that is async or does not accept the arguments of `Callback`'s.
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
                    _check_hook(one, name)
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
        """Call a hook of each callback that has it; what it draws or sets does not affect the training."""
        for one in self._callbacks:
            if not _has_own(one, name):
                continue
            hook = getattr(one, name)
            if getattr(one, "guarded", True):
                with process_kept():
                    hook(*values)
            else:
                hook(*values)


def _has_own(callback: object, name: str) -> bool:
    """Whether a callback has a hook other than the one of `Callback`, which does nothing."""
    hook = getattr(callback, name, None)
    return callable(hook) and getattr(hook, "__func__", None) is not getattr(Callback, name)


def _check_hook(callback: object, name: str) -> None:
    """Check that a hook takes the arguments of `Callback`'s; otherwise the run would fail hours later.

    What an ``async def`` returns when it is called does nothing, so such a hook is refused, too.
    """
    hook = getattr(callback, name)
    if inspect.iscoroutinefunction(hook):
        raise UserError(
            f"{type(callback).__name__}.{name} is an async function, which a run would not await; write def"
        )
    given = list(inspect.signature(getattr(Callback, name)).parameters)[1:]
    try:
        signature = inspect.signature(hook)
    except (TypeError, ValueError):  # a function in C may have no signature
        return
    try:
        signature.bind(*given)
    except TypeError as error:
        raise UserError(
            f"{type(callback).__name__}.{name}{signature} is a callback's hook and is called with "
            f"({', '.join(given)}): {error}"
        ) from None
