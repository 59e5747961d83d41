"""What a component needs before the run: another run, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from atoll.core.tree import Weights
from atoll.data.images import Pixels


@dataclass(frozen=True)
class Prerequisite:
    """A run that a component needs first: centralised, resumable, in the run's own folder.

    Its networks are built as this run's are, from the same ``[model]`` section and for images of the same form.

    Attributes:
        recipe: a preset's name or a TOML file that describes it whole; empty: it has this run's seed, views,
            networks, training and engine.
        settings: what is laid over those, by section and key.
    """

    recipe: str = ""
    settings: Mapping[str, Mapping[str, object]] = field(default_factory=dict)


@dataclass(frozen=True)
class Trained:
    """What came of a `Prerequisite`.

    Attributes:
        weights: of all its networks.
        images: what they learnt from.
    """

    weights: Weights
    images: Pixels
