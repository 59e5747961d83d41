"""Errors that mean that memory ran out, and the sentence that a command prints for them."""

from __future__ import annotations

NO_MEMORY = "the memory does not suffice; choose smaller sizes, batches or images in the recipe"
_WORDS = ("can't allocate memory", "not enough memory", "out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception of Python or PyTorch says that memory could not be allocated.

    Example:
        >>> from atoll.core.memory import is_out_of_memory
        >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("shapes differ"))
        (True, False)
    """
    return isinstance(error, MemoryError) or any(words in str(error) for words in _WORDS)
