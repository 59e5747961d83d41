"""Enrolment of a site: what it tells of itself when the coordinator first asks, and how that is checked."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

from atoll.components.declaration import LARGEST, MOST_IMAGES
from atoll.core.environment import Environment, difference
from atoll.core.text import clean, one_line
from atoll.core.tree import Tree
from atoll.engines.flower.exchange import Lost

FORMAT = 3  # of requests and answers; both sides must use the same
MOST_CLASSES = 100_000
MOST_FACTS, LONGEST_WORD = 50, 200  # of an environment


@dataclass
class Site:
    """One site.

    Attributes:
        name: Name in its node's configuration, or the number of its share.
        key: Public key of its node in hex; empty if nodes are not authenticated.
        train: Number of its training images.
        test: Number of the held-out images that it measures on.
        classes: Names of its classes, if its images have labels.
        node: Id of its current node; None if none has connected to this process yet.
        version: Version of Atoll at the site.
        environment: The facts on which the last bits of its results depend (see `atoll.core.environment`).
        withdrawn: Whether it has left the run for good.
        excluded: Whether the coordinator's file of keys excludes it, which has been logged.
    """

    name: str
    key: str
    train: int
    test: int
    classes: list[str]
    node: int | None = None
    version: str = ""
    environment: Environment = field(default_factory=dict)
    withdrawn: bool = False
    excluded: bool = False

    @classmethod
    def restored(cls, record: Mapping[str, Tree]) -> Site:
        """Make the site of an interrupted run from its record, which holds its fields; its node is unknown.

        Raises:
            KeyError: The record is incomplete.
        """
        return cls(
            **{name: record[name] for name in ("name", "key", "train", "test", "classes")},
            **{name: record[name] for name in ("environment", "withdrawn", "excluded") if name in record},
        )

    def changed(self, now: Site, other_environment: bool, other_images: bool) -> str | None:
        """Reason why a site cannot go on as it comes back now; None if it can.

        Args:
            now: The site as it describes itself now.
            other_environment: Whether it may have changed its environment.
            other_images: Whether it may have changed its images.
        """
        # Runs of the first versions have no record of the environments.
        known = self.environment and not other_environment
        if known and (change := difference(self.environment, now.environment)):
            return (
                f"{self.name!r} took part with {change}; restart it in the same environment, or set "
                "other-environment = true in the app"
            )
        if not other_images and (was := self._images()) != (has := now._images()):
            return (
                f"{self.name!r} took part with {was}, and has {has}; restore its images, or start a new run"
            )
        return None

    def _images(self) -> str:
        classes = f" of the classes {', '.join(self.classes)}" if self.classes else ""
        return f"{self.train:,} training and {self.test:,} held-out images{classes}"


def all_classes(sites: Sequence[Site]) -> list[str]:
    """Return the classes of all sites."""
    lists = [site.classes for site in sites]
    if all(names == lists[0] for names in lists):
        return lists[0]
    return sorted({name for names in lists for name in names})


def read_site(answer: dict[str, Tree] | Lost, key: str, node: int, real: bool) -> Site | str:
    """Read a site from its answer; if this fails, return the reason. A ``real`` site must have local images."""
    if isinstance(answer, Lost):
        # A node of Flower 1.41 whose run ended while it was fetching a request sends each later answer only with
        # the next request.
        remedy = "; if its log does not say why, restart the node" if answer.late else ""
        return f"{answer.reason}{remedy}"
    if "lost" in answer:
        return one_line(answer["lost"])
    name, train, test, classes = (answer.get(field) for field in ("name", "train", "test", "classes"))
    if not isinstance(name, str) or not is_site_name(name) or not (real or re.fullmatch("[0-9]+", name)):
        return "its answer contains no valid name"
    if not is_count(train, 2 if real else 0) or not is_count(test, 0):
        return f"it reports {reprlib.repr(train)} training and {reprlib.repr(test)} held-out images"
    if not isinstance(classes, list) or len(classes) > MOST_CLASSES or not all(map(_is_class, classes)):
        return "its classes are not a list of names"
    atoll, here = answer.get("version"), answer.get("environment")
    if not _is_word(atoll) or not _is_environment(here):
        return "its answer does not describe its version and its environment"
    return Site(name, key, train, test, [clean(one) for one in classes], node, atoll, here)


def claimed_name(answer: dict[str, Tree] | Lost) -> str:
    """Name of the site that its answer claims, which nothing has verified; empty if it claims none."""
    name = "" if isinstance(answer, Lost) else answer.get("name")
    return name if isinstance(name, str) and is_site_name(name) else ""


def is_site_name(name: str) -> bool:
    """Whether a name is valid for a site: it appears in logs, reports and paths."""
    return bool(re.fullmatch(r"\w[\w .-]{0,99}", name))


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a number that is small enough to compute with."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def is_count(value: object, least: int = 1) -> TypeGuard[int]:
    """Whether a value is a plausible number of images at one site."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= MOST_IMAGES


def _is_environment(value: Tree) -> TypeGuard[Environment]:
    if not isinstance(value, dict) or len(value) > MOST_FACTS:
        return False
    return all(_is_word(key) and (type(one) is int or _is_word(one)) for key, one in value.items())


def _is_word(value: Tree) -> TypeGuard[str]:
    return isinstance(value, str) and len(value) <= LONGEST_WORD and clean(value) == value


def _is_class(name: Tree) -> bool:
    return isinstance(name, str) and len(name) <= 1000 and name.encode(errors="replace").decode() == name
