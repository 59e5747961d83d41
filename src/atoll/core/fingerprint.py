"""Fingerprints of Python objects: digests of their code and content, equal in every process."""

from __future__ import annotations

import contextlib
import dis
import functools
import hashlib
import importlib.metadata
import importlib.util
import logging
import re
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

DIGITS = 12
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_OF_PYTHON_OR_ATOLL = {*sys.stdlib_module_names, __name__.partition(".")[0]}


def fingerprint(value: Any, versions: bool = True) -> str:
    """Compute a digest of an object's type and content.

    Functions and classes of the user's code are identified by their compiled code, with the values that a function
    takes from enclosing scopes or imports; those of Atoll and of installed libraries by their names and the
    library's version. Comments do not count. Other Python versions compile the same code to another digest.

    Args:
        value: Any object: a function, a module, an instance of a class.
        versions: Whether the versions of Atoll and of libraries count.

    Example:
        >>> from functools import partial
        >>> from atoll.core.fingerprint import fingerprint
        >>> fingerprint(partial(round, ndigits=2)) == fingerprint(partial(round, ndigits=2))
        True
        >>> fingerprint(partial(round, ndigits=2)) == fingerprint(partial(round, ndigits=3))
        False
    """
    found = _Fingerprint(versions)
    found.add(value)
    return found.digest.hexdigest()[:DIGITS]


def installed_version(module: str) -> str:
    """Version of the installed package that has a module; empty for the user's modules, Python's and Atoll's.

    Args:
        module: The name of a module that is imported.
    """
    top = module.partition(".")[0]
    if top in _OF_PYTHON_OR_ATOLL or not is_library(module):
        return ""
    names = importlib.metadata.packages_distributions().get(top, ())
    versions = [importlib.metadata.version(name) for name in sorted({*names})]
    return " ".join(versions) or str(getattr(sys.modules[top], "__version__", ""))


class _Fingerprint:
    def __init__(self, versions: bool) -> None:
        self.digest = hashlib.sha256()
        self._versions = versions
        self._around: dict[int, Any] = {}  # the values that contain the current one, so that cycles end

    def add(self, value: Any) -> None:
        """Add a value and all its content to the digest."""
        if isinstance(value, _PLAIN):
            return self._feed(f"{type(value).__name__} {value!r}")
        if id(value) in self._around:
            return self._feed("again")
        self._around[id(value)] = value
        self._feed(self._name(type(value)))
        if isinstance(value, type | types.FunctionType):
            self._feed(self._name(value))
        for part in _parts(value, self._versions):
            if isinstance(part, bytes):
                self.digest.update(part)
            else:
                self.add(part)
        if not isinstance(value, type | types.FunctionType | types.ModuleType):
            del self._around[id(value)]  # equal tuples may be one object, or several
        return None

    def _feed(self, text: str) -> None:
        self.digest.update(f"{text};".encode())

    def _name(self, value: Any) -> str:
        module = str(value.__module__)
        if not is_library(module):
            return str(value.__qualname__)  # a script's module has another name in other processes
        top = sys.modules.get(module.partition(".")[0])
        version = getattr(top, "__version__", "") if self._versions else ""
        return f"{module}.{value.__qualname__} {version}"


def _parts(value: Any, versions: bool) -> list[Any]:
    """The parts of a value that is not plain."""
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
        return sorted(fingerprint(one, versions) for one in value)
    if isinstance(value, logging.Logger):
        return [value.name]  # because it refers to all other loggers
    if isinstance(value, types.ModuleType):
        return [value.__name__, *([] if is_library(value.__name__) else _held(value))]
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
        return [] if is_library(value.__module__) else _of_function(value)
    if isinstance(value, type):
        return [] if is_library(value.__module__) else [*value.__bases__, *_held(value)]
    held = getattr(value, "__dict__", None)
    return [type(value), re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value)) if held is None else held]


def _of_function(function: types.FunctionType) -> list[Any]:
    """Code, defaults, and the values that the code imports or takes from enclosing functions and the module."""
    codes = _codes(function.__code__)
    names = dict.fromkeys(name for code in codes for name in code.co_names)
    used = {name: function.__globals__[name] for name in names if name in function.__globals__}
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    imported = [module for code in codes for module in _imported(code, function.__globals__)]
    return [function.__code__, function.__defaults__, function.__kwdefaults__, cells, used, *imported]


def _codes(code: types.CodeType) -> list[types.CodeType]:
    """A function's code, and that of the functions inside it."""
    inner = [part for part in code.co_consts if isinstance(part, types.CodeType)]
    return [code, *(deeper for part in inner for deeper in _codes(part))]


def _imported(code: types.CodeType, around: dict[str, Any]) -> Iterator[Any]:
    """The user's modules that code imports when it runs; modules that cannot be imported do not count."""
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    for level, names, step in zip(steps, steps[1:], steps[2:], strict=False):
        if step.opname != "IMPORT_NAME":
            continue
        with contextlib.suppress(Exception, SystemExit):  # the user's module may raise any exception
            top = "." * level.argval + step.argval.partition(".")[0]
            if _is_own(importlib.util.resolve_name(top, around.get("__package__"))):
                asked = names.argval or ("__name__",)  # with a name, the innermost module is returned
                module = __import__(step.argval, around, None, asked, level.argval)
                yield from [getattr(module, name) for name in names.argval] if names.argval else [module]


def _is_own(module: str) -> bool:
    """Whether the user has a module of this name, which may not be imported yet."""
    spec = None if is_library(module) else importlib.util.find_spec(module)
    return spec is not None and not (spec.origin or "").startswith(_INSTALLED)


def _held(value: type | types.ModuleType) -> list[Any]:
    """The definitions in a user's class or module, by name."""
    return [
        part
        for name, held in vars(value).items()
        if name != "_abc_impl" and (not name.startswith("__") or isinstance(held, types.FunctionType))
        for part in (name, held)
    ]


def is_library(module: str) -> bool:
    """Whether a module is Python's own, Atoll's or an installed library's."""
    if module in ("__main__", "__mp_main__"):  # in a notebook, its file is that of an installed program
        return False
    if module.partition(".")[0] in _OF_PYTHON_OR_ATOLL:
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and file.startswith(_INSTALLED)
