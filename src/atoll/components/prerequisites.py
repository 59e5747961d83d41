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

    @classmethod
    def centralised(cls, method: str, data: Mapping[str, object], epochs: int) -> Prerequisite:
        """A run in which one client holds all images and keeps its optimiser.

        Args:
            method: its name.
            data: the ``[data]`` section.
            epochs: over all images.
        """
        train = {"rounds": epochs, "epochs": 1, "participation": 1.0, "keep_optimizer": True}
        return cls(
            settings={
                "data": data,
                "partition": {"kind": "centralised"},
                "method": {"name": method},
                # BatchNorm's running statistics must be part of what results: frozen networks read them
                "train": {**train, "bn_buffers": "average"},
                "evaluation": {"every": 0, "at_end": ["geometry"]},
            }
        )


@dataclass(frozen=True)
class Trained:
    """What came of a `Prerequisite`.

    Attributes:
        weights: of all its networks.
        images: what they learnt from.
    """

    weights: Weights
    images: Pixels
