"""Prerequisites: runs that a component needs before its own run, and their results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from atoll.core.tree import Weights
from atoll.data.images import Pixels


@dataclass(frozen=True)
class Prerequisite:
    """A run that a component needs first: centralised, resumable, with a folder inside the run's folder.

    Both runs build the same networks, from the same ``[model]`` section and for images of the same form.

    Attributes:
        recipe: Name of a preset, or a TOML file with the complete recipe. If empty, the seed, views, networks,
            training and engine are those of this run.
        settings: Settings that override these values, by section and key.
    """

    recipe: str = ""
    settings: Mapping[str, Mapping[str, object]] = field(default_factory=dict)

    @classmethod
    def centralised(cls, method: str, data: Mapping[str, object], epochs: int) -> Prerequisite:
        """Describe a run in which one client holds all images and retains its optimiser state.

        Args:
            method: Name of the method.
            data: The ``[data]`` section.
            epochs: Number of epochs over all images.
        """
        train = {"rounds": epochs, "epochs": 1, "participation": 1.0, "keep_optimizer": True}
        return cls(
            settings={
                "data": data,
                "partition": {"kind": "centralised"},
                "method": {"name": method},
                # The result must include BatchNorm's running statistics, because frozen networks use them.
                "train": {**train, "bn_buffers": "average"},
                "evaluation": {"every": 0, "at_end": ["geometry"]},
            }
        )


@dataclass(frozen=True)
class Trained:
    """The result of a `Prerequisite`.

    Attributes:
        weights: Weights of all its networks.
        images: The images on which they were trained.
    """

    weights: Weights
    images: Pixels
