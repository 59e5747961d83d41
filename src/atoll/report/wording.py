"""Words for counts, values and the settings of a recipe."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from atoll.core.run_folder import is_of_sites
from atoll.core.text import plural

# The main options of each kind of partition.
PARTITION_PARAMETERS = {
    "quantity": ("alpha",),
    "dirichlet": ("alpha", "variant"),
    "skew": ("beta",),
    "shards": ("classes_per_client",),
    "natural": ("column",),
}


def either(words: Sequence[str]) -> str:
    """Join alternatives.

    Example:
        >>> from atoll.report.wording import either
        >>> either(["359", "50"]), either(["1", "2", "3"])
        ('359 or 50', '1, 2 or 3')
    """
    return " or ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)


def show(value: Any) -> str:
    """Format a recipe's value for readers."""
    if isinstance(value, list | tuple):
        return ", ".join(map(show, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return "not set" if value is None else without_folder(str(value))


def partition_kind(partition: Mapping[str, Any]) -> str:
    """Kind of a partition (a ``[partition]`` section) with its main parameters."""
    kind = str(partition.get("kind", "unknown"))
    parameters = ", ".join(
        f"{name.replace('_', ' ')} {show(partition[name])}"
        for name in PARTITION_PARAMETERS.get(kind, ())
        if partition.get(name) is not None
    )
    of = " of feature clusters" if partition.get("features") and kind != "centralised" else ""
    return f"{kind}{of} ({parameters})" if parameters else f"{kind}{of}"


def partition_words(partition: Mapping[str, Any]) -> str:
    """Describe a run's partition, as its file has it; the recipe's options do not apply to real sites' images."""
    return "sites' own images" if is_of_sites(partition) else partition_kind(partition.get("options", {}))


def setting_words(recipe: Mapping[str, Any]) -> str:
    """Describe the images of a run, its clients, their partition and their shifts, from its recipe."""
    shifts = recipe.get("shift", {}).get("kinds")
    shifted = f", {' and '.join(shifts)} by client" if shifts else ""
    return f"{images_words(recipe)}, {partition_kind(recipe.get('partition', {}))}{shifted}"


def images_words(recipe: Mapping[str, Any]) -> str:
    """Describe the images of a run and its clients."""
    data, partition = recipe.get("data", {}), recipe.get("partition", {})
    facts = [source_words({**data, "path": without_folder(str(data.get("path") or ""))})]
    if data.get("limit"):
        facts.append(f"at most {plural(data['limit'], 'image')}")
    if "clients" in partition and partition.get("kind") not in ("natural", "centralised"):
        facts.append(plural(partition["clients"], "client"))
    return ", ".join(facts)


def source_words(data: Mapping[str, Any]) -> str:
    """Describe the source of a ``[data]`` section's images."""
    source = str(data.get("source", "unknown images"))
    return f"{data['path']} ({source})" if data.get("path") and source != "digits" else source


def without_folder(path: str) -> str:
    """Only the last part of an absolute path, for a page that others may read; any other text as it is.

    Example:
        >>> from atoll.report.wording import without_folder
        >>> without_folder("/home/me/my data/cifar10/"), without_folder("cifar10/small")
        ('…/cifar10', 'cifar10/small')
    """
    return re.sub(r"^(?:/|~|[A-Za-z]:[/\\]).*?([^/\\]+)[/\\]?$", r"…/\1", path)


def without_folders(text: str) -> str:
    """A text for a page that others may read: only the last part of each absolute path.

    Example:
        >>> from atoll.report.wording import without_folders
        >>> without_folders('path = "/home/me/my data/cifar10" came from /mnt/x/encoder.safetensors; more')
        'path = "…/cifar10" came from …/encoder.safetensors; more'
    """
    text = re.sub(r'"(?:/|~|[A-Za-z]:\\)[^"]*?[/\\]([^"/\\]+)[/\\]?"', r'"…/\1"', text)
    return re.sub(r'(?<![\w"/…])(?:/|~/|[A-Za-z]:\\)(?:[^\s"/\\]+[/\\])+', "…/", text)
