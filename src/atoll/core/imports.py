"""Import of attributes that a recipe names as ``module:attribute``: the only place that imports user code.

Reading a recipe must not run arbitrary code. A module that a recipe's file names is searched for in that file's
folder and among the installed modules (on Python's path, without the working folder). The working folder is
searched only for names that the user typed or that Python code gave. A finished run's recipe and encoder may come
from elsewhere, so their names are searched for only on Python's path. Some commands import nothing
(`nothing_imported`).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from atoll.core.errors import UserError, did_you_mean
from atoll.core.given import class_given
from atoll.core.text import type_words

# Folders for names; None for the working folder. Like Python's own path, they belong to the process.
_folders: dict[str, tuple[Path, ...] | None] = {}
_settings: dict[str, str] = {}  # those of a recipe that name code, for messages
_importing = [True]


def search(
    names: Iterable[str],
    folders: Sequence[Path] | None,
    keep: bool = False,
    settings: Mapping[str, str] | None = None,
) -> None:
    """Set the folders in which names are searched for, in addition to installed modules.

    Args:
        names: Names, ``module:attribute``.
        folders: The folders; None for the working folder.
        keep: Whether names keep folders that are already set.
        settings: The setting, ``key=value``, that gives each name in the command.
    """
    _settings.update(settings or {})
    for name in names:
        if not keep or name not in _folders:
            _folders[name] = None if folders is None else tuple(folder.resolve() for folder in folders)


@contextlib.contextmanager
def nothing_imported() -> Iterator[None]:
    """Refuse all imports of users' code inside the block."""
    _importing.append(False)
    try:
        yield
    finally:
        _importing.pop()


def code_words(names: Iterable[str]) -> str:
    """Describe the code of names without importing it: each name with its file and the file's SHA-256."""
    return "; ".join(f"{name} ({_file_words(name)})" for name in names)


def folders_of(names: Iterable[str]) -> list[str]:
    """The folders, other than those of Python's path, in which the modules of names are found.

    Args:
        names: Names, ``module:attribute``.
    """
    return list(dict.fromkeys(str(folder) for name in names if (folder := _folder_of(name)) is not None))


def python_files(names: Iterable[str]) -> dict[str, Path]:
    """The Python files of the modules that `folders_of` finds, by their paths relative to those folders.

    A module in a package comes with the whole package.
    """
    found: dict[str, Path] = {}
    for name in names:
        if (folder := _folder_of(name)) is not None:
            top = folder / name.partition(":")[0].partition(".")[0]
            files = sorted(top.rglob("*.py")) if top.is_dir() else [top.with_suffix(".py")]
            found |= {str(file.relative_to(folder)): file for file in files if file.is_file()}
    return found


def import_attribute(name: str, what: str) -> Any:
    """Import the attribute of a user's module that ``module:attribute`` names.

    Args:
        name: The name, ``module:attribute``.
        what: The role of the attribute in a recipe, for messages.

    Raises:
        UserError: The module does not exist or cannot be imported, or it has no such attribute.

    Example:
        >>> from atoll.core.imports import import_attribute
        >>> import_attribute("torch:pi", "number")
        3.141592653589793
    """
    if not _importing[-1]:
        raise UserError(f"{what} {code_words([name])} is code that this command does not import")
    module, _, attribute = name.partition(":")
    if module.startswith(".") or module.endswith(".py") or {"/", "\\"}.intersection(module):
        stem = Path(module).stem.strip(".") or "module"
        raise UserError(
            f"{what} {name!r}: a module is named without folder and suffix, such as {stem}:{attribute}; it is "
            "looked for in the working folder, or beside the recipe's file that names it"
        )
    if module.partition(".")[0] in sys.stdlib_module_names:  # http.server:test would serve the working folder
        raise UserError(f"{what} {name!r}: module {module!r} is Python's own; call yours something else")
    folder = _folder_of(name)
    if folder is not None and str(folder) not in sys.path:
        sys.path.insert(0, str(folder))  # for the module's own imports, and for worker processes
    try:
        with _without_working_folder():
            imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UserError(f"{what} {name!r}: no module {error.name!r} {_where_not(name)}") from None
    except UserError as error:
        raise UserError(f"{what} {name!r}: {error}") from None
    except Exception as error:  # importing the user's module may raise any exception
        raise UserError(
            f"{what} {name!r}: module {module!r} cannot be imported: {describe_error(error)}; fix it, then run "
            "again"
        ) from error
    if not hasattr(imported, attribute):
        known = [one for one in vars(imported) if not one.startswith("_")]
        hint = did_you_mean(attribute, known) if known else "it defines nothing"
        raise UserError(f"{what} {name!r}: module {module!r} has no {attribute!r}; {hint}")
    return getattr(imported, attribute)


def import_function(name: str, what: str) -> Callable[..., Any]:
    """Import an attribute that is called.

    Raises:
        UserError: As `import_attribute`, or it cannot be called, or it is a class.
    """
    found: Callable[..., Any] = import_attribute(name, what)
    if isinstance(found, type):
        raise class_given(f"{what} {name!r}", found)
    if not callable(found):
        raise UserError(f"{what} {name!r} is {type_words(found)}, not a function")
    return found


def _where_not(name: str) -> str:
    """Say where a name was searched for without success, and what to do."""
    folders = _folders.get(name)
    if folders is None:
        return "in this folder or the environment"
    if not folders:
        return (
            "in the environment; what a run or an encoder's file names is not taken from the working folder: if "
            "you trust that code, set PYTHONPATH to its folder"
        )
    setting = _settings.get(name, "method.name=MODULE:ATTRIBUTE")
    setting = f'"{setting}"' if "'" in setting else setting  # a list, whose quotes a shell would remove
    return (
        f"in {' or '.join(map(str, folders))} or the environment; a recipe's file names modules beside it, and one "
        f"of the working folder is named in the command, such as --set {setting}"
    )


def _folder_of(name: str) -> Path | None:
    """The first of a name's folders that contains its module; None if none does."""
    top = name.partition(":")[0].partition(".")[0]
    folders = _folders.get(name)
    if folders is None:
        folders = (Path(os.getcwd()),)
    return next((folder for folder in folders if top and PathFinder.find_spec(top, [str(folder)])), None)


@contextlib.contextmanager
def _without_working_folder() -> Iterator[None]:
    """Remove the working folder from Python's path, where an interactive session lists it as ""."""
    found = "" in sys.path
    if found:
        sys.path.remove("")
    try:
        yield
    finally:
        if found:
            sys.path.insert(0, "")


def _file_words(name: str) -> str:
    folder, path = _folder_of(name), None
    places: Sequence[str] | None = [str(folder)] if folder else [entry for entry in sys.path if entry]
    for word in name.partition(":")[0].split("."):
        spec = PathFinder.find_spec(word, places) if word else None
        if spec is None:
            return "not found here"
        path, places = spec.origin, spec.submodule_search_locations
    if path is None or not Path(path).is_file():
        return "not a file"
    return f"{path}, SHA-256 {hashlib.sha256(Path(path).read_bytes()).hexdigest()}"


def describe_error(error: Exception) -> str:
    """Describe an error in a user's file: its type, its message and the last line of the user's own code."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    from atoll.core.fingerprint import is_library  # imports PyTorch; only after a mistake

    frames = list(traceback.walk_tb(error.__traceback__))
    own = [one for one in frames if not is_library(one[0].f_globals.get("__name__", ""))]
    where = "".join(f" ({at.f_code.co_filename}, line {line})" for at, line in (own or frames)[-1:])
    return f"{type(error).__name__}: {error}{where}"
