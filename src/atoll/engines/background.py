"""A thread for work that the next round need not wait for, such as writing a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType


class Background:
    """Runs tasks on another thread, one at a time, in the order in which they were given.

    An error of a task is raised in the caller's thread: by the next call, or at the end of the ``with`` block,
    which waits for the last task.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="background")
        self._pending: Future[None] | None = None

    def __enter__(self) -> Background:
        return self

    def run(self, task: Callable[[], None]) -> None:
        """Start a task once the previous one has ended."""
        self.wait()
        self._pending = self._pool.submit(task)

    def wait(self) -> None:
        """Wait for the task, and raise its error."""
        pending, self._pending = self._pending, None
        if pending:
            pending.result()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the task, and raise its error unless the block itself raises one."""
        self._pool.shutdown()
        if error is None:
            self.wait()
