"""Fingerprints of Python objects: what an object does and holds, equal in every process."""

from __future__ import annotations

import functools
import hashlib
import re
import sys
import sysconfig
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

DIGITS = 12
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def fingerprint(value: Any) -> str:
    """Compute a digest of an object's type and content.

    Functions and classes of the user's own code count by their compiled code, with the values that a function takes
    from around it; those of installed libraries by their names and the library's version.

    Args:
        value: Any object: a function, a module, an instance of a class.

    Example:
        >>> from functools import partial
        >>> from atoll.core.fingerprint import fingerprint
        >>> fingerprint(partial(round, ndigits=2)) == fingerprint(partial(round, ndigits=2))
        True
        >>> fingerprint(partial(round, ndigits=2)) == fingerprint(partial(round, ndigits=3))
        False
    """
    digest = hashlib.sha256()
    _add(value, lambda text: digest.update(text if isinstance(text, bytes) else f"{text};".encode()), {})
    return digest.hexdigest()[:DIGITS]


def _add(value: Any, feed: Callable[[str | bytes], None], around: dict[int, Any]) -> None:
    """Feed a digest with a value; ``around`` holds the values that contain it, so that circles end."""
    if isinstance(value, _PLAIN):
        return feed(f"{type(value).__name__} {value!r}")
    if id(value) in around:
        return feed("again")
    around[id(value)] = value
    feed(_name(type(value)))
    for part in _parts(value):
        if isinstance(part, bytes):
            feed(part)
        else:
            _add(part, feed, around)
    if not isinstance(value, type | types.FunctionType):  # equal tuples may be one object, or several
        del around[id(value)]
    return None


def _parts(value: Any) -> list[Any]:
    """What makes up a value that is not plain."""
    if isinstance(value, torch.Tensor):
        numbers = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return [str(value.dtype), str(tuple(value.shape)), numbers.tobytes()]
    if isinstance(value, np.ndarray | np.generic):
        content = value.tolist() if value.dtype.hasobject else value.tobytes()
        return [str(value.dtype), str(value.shape), content]
    if isinstance(value, Mapping):
        return [part for pair in value.items() for part in pair]
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, set | frozenset):
        return sorted(map(fingerprint, value))
    if isinstance(value, types.ModuleType):
        return [value.__name__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, classmethod | staticmethod):
        return [value.__func__]
    if isinstance(value, property):
        return [value.fget, value.fset]
    if isinstance(value, types.CodeType):
        return [value.co_code, *value.co_names, *value.co_consts]
    if isinstance(value, types.FunctionType):
        return [_name(value), *([] if _is_installed(value.__module__) else _of_function(value))]
    if isinstance(value, type):
        return [_name(value), *([] if _is_installed(value.__module__) else _of_class(value))]
    held = getattr(value, "__dict__", None)
    return [type(value), re.sub(r" at 0x[0-9a-f]+", "", repr(value)) if held is None else held]


def _of_function(function: types.FunctionType) -> list[Any]:
    """Code, defaults, and what the code finds in the enclosing functions and in the module."""
    names = dict.fromkeys(_names(function.__code__))
    used = {name: function.__globals__[name] for name in names if name in function.__globals__}
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return [function.__code__, function.__defaults__, function.__kwdefaults__, cells, used]


def _names(code: types.CodeType) -> list[str]:
    inner = [name for part in code.co_consts if isinstance(part, types.CodeType) for name in _names(part)]
    return [*code.co_names, *inner]


def _of_class(kind: type) -> list[Any]:
    """Bases, methods and attributes."""
    own = {
        name: value
        for name, value in vars(kind).items()
        if name != "_abc_impl" and (not name.startswith("__") or isinstance(value, types.FunctionType))
    }
    return [*kind.__bases__, own]


def _name(value: Any) -> str:
    module = str(value.__module__)
    if not _is_installed(module):
        return str(value.__qualname__)  # a script's module has another name in other processes
    top = sys.modules.get(module.partition(".")[0])
    return f"{module}.{value.__qualname__} {getattr(top, '__version__', '')}"


def _is_installed(module: str) -> bool:
    """Whether a module is Python's own or an installed library's."""
    if module in ("__main__", "__mp_main__"):  # a notebook's has the file of an installed program
        return False
    if module.partition(".")[0] in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and file.startswith(_INSTALLED)
