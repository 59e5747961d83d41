"""Environment variables that libraries and child processes read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def environment_variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables of this process within the context; all others remain as they are.

    Args:
        values: Values by the variables' names.

    Example:
        >>> import os
        >>> from atoll.core.variables import environment_variables
        >>> with environment_variables({"ATOLL_EXAMPLE": "1"}):
        ...     os.environ["ATOLL_EXAMPLE"]
        '1'
        >>> "ATOLL_EXAMPLE" in os.environ
        False
    """
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
