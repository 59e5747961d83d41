"""Text from other sources, such as names of classes, titles and error messages, cleaned before it is shown."""

from __future__ import annotations

import reprlib
import unicodedata
from collections.abc import Iterable

LONGEST = 1000  # maximum number of characters in a line
_REPLACED = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # control and format characters, lone surrogates, line separators


def clean(text: str, by: str = "�") -> str:
    r"""Replace control characters, which could move a terminal's cursor or reorder a line.

    Example:
        >>> from atoll.core.text import clean
        >>> clean("cat\x1b[2J")
        'cat�[2J'
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(by if unicodedata.category(letter) in _REPLACED else letter for letter in text)


def one_line(value: object) -> str:
    r"""Shorten a text of unknown length to one clean line, such as a node's reason in a log.

    Example:
        >>> from atoll.core.text import one_line
        >>> one_line("a disk\n  is full\x07")
        'a disk is full�'
    """
    text = clean(" ".join(str(value).split()))
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} …"


def error_words(error: BaseException) -> str:
    """An error's message in one clean line; its type if the message is empty."""
    return one_line(error) or type(error).__name__


def few(names: Iterable[str], most: int = 3) -> str:
    """The first of some names, and how many more there are.

    Example:
        >>> from atoll.core.text import few
        >>> few(["cat", "dog", "fox", "hen", "owl"])
        'cat, dog, fox and 2 more'
    """
    listed = list(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


def plural(count: int, word: str) -> str:
    """Format a count with its noun.

    Example:
        >>> from atoll.core.text import plural
        >>> plural(1, "image"), plural(2000, "image")
        ('1 image', '2,000 images')
    """
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def type_words(value: object) -> str:
    """Name a value's type with its article.

    Example:
        >>> from atoll.core.text import type_words
        >>> type_words(3), type_words("cat"), type_words(None)
        ('an int', 'a str', 'None')
    """
    name = type(value).__name__
    return "None" if value is None else f"an {name}" if name[0] in "aeioAEIO" else f"a {name}"


def first_line(error: BaseException | None) -> str:
    r"""First line of another library's error message, for use in a sentence; the error's type if it is empty.

    Example:
        >>> from atoll.core.text import first_line
        >>> first_line(ValueError("No such model.\nTry another.")), first_line(AssertionError())
        ('No such model', 'AssertionError')
    """
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


def short(value: object) -> str:
    """Describe an untrusted value in a few characters, on one line.

    Example:
        >>> from atoll.core.text import short
        >>> short("a" * 1_000_000)
        "'aaaaaaaaaaaa...aaaaaaaaaaaaa'"
    """
    return clean(" ".join(reprlib.repr(value).split()))


def byte_size(count: float) -> str:
    """A number of bytes in a decimal unit (a megabyte is a million bytes).

    Example:
        >>> from atoll.core.text import byte_size
        >>> byte_size(3), byte_size(45_712_345), byte_size(2.5e9)
        ('3 B', '45.7 MB', '2.5 GB')
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:,.1f} {unit}"
    return f"{count:.0f} B"
