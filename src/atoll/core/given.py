"""Objects that Python code gives to a run: recipes contain their names, and the run's processes the objects."""

from __future__ import annotations

import re
from typing import Any

import cloudpickle

from atoll.core.errors import UserError
from atoll.core.text import type_words

PREFIX = "object:"


class Given(str):
    """The name of an object, ``object:NAME#FINGERPRINT``, that carries the object.

    It takes the place of a name in a recipe. A recipe's file contains only the text, with which the objects that a
    resumed run is given again are compared. A worker process receives the object with the recipe, by cloudpickle
    through its own pipe, so that classes of a notebook work; nothing pickled is written to a file.

    Attributes:
        value: The object.

    Example:
        >>> from atoll.core.given import Given
        >>> Given.named("Net", "1a2b3c4d", object())
        'object:Net#1a2b3c4d'
    """

    value: Any

    def __new__(cls, text: str, value: Any) -> Given:
        """Attach an object to its name."""
        made = super().__new__(cls, text)
        made.value = value
        return made

    @classmethod
    def named(cls, name: str, fingerprint: str, value: Any) -> Given:
        """Make the name of an object from its author's name and a digest of its content."""
        plain = re.sub(r"[^\w.]", "", name)  # without "<locals>" and "<lambda>"
        return cls(f"{PREFIX}{plain}#{fingerprint}", value)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (str(self), cloudpickle.dumps(self.value))


def value_of(name: str | None) -> Any:
    """The object that a name in a recipe carries; None if the name carries none."""
    return name.value if isinstance(name, Given) else None


def not_given(role: str, found: Any, key: str, expected: str) -> UserError:
    """Make the error for an unsuitable object, such as a name, which belongs in the recipe under ``key``."""
    name = f"name {found!r} in the recipe, as {key}, or " if isinstance(found, str) else ""
    return UserError(f"{role} is {type_words(found)}; {name}give {expected}")


def class_given(role: str, found: type) -> UserError:
    """Make the error for a class in the place of its object."""
    return UserError(f"{role} is the class {found.__name__}; give an object of it, {found.__name__}(…)")


def names_code(name: str) -> bool:
    """Whether a name in a recipe is ``module:attribute``, not that of an object."""
    return ":" in name and not name.startswith(PREFIX)


def _restored(text: str, pickled: bytes) -> Given:
    return Given(text, cloudpickle.loads(pickled))
