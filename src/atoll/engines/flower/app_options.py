"""The coordinator's options: the configuration of the Flower app that `atoll federate init` writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from atoll.core.config import Options, build, describe
from atoll.core.schema import Positive, Whole


@dataclass(frozen=True)
class FlowerOptions(Options, section="tool.flwr.app.config"):
    """The coordinator's options in addition to the recipe: the keys of a Flower app's configuration.

    Attributes:
        recipe: A preset's name, or a file in the app's folder.
        set: Settings that override the recipe's, as ``key=value key=value``.
        out: The run's folder; empty for ``runs/NAME-seedN``, under ``$ATOLL_RUNS`` if that is set.
        sites: Number of real sites; 0 if the nodes train shares of the recipe's images.
        images: Folder of the coordinator's images for evaluation; empty for none.
        images_source: Format of that folder (see the recipe's ``data.source``).
        wait: Number of seconds to wait for the sites.
        deadline: Maximum duration of a round in seconds.
        keys: File that binds the sites' names to their keys (see `KnownSites`); empty to let a node with any
            registered key choose its name.
        other_environment: Whether the coordinator and the sites may continue a run on other kinds of CPUs or with
            other libraries; the weights will differ.
        log: Tools that follow the run (``tensorboard wandb mlflow``), separated by spaces.
    """

    recipe: str = "recipe.toml"
    set: str = ""
    out: str = ""
    sites: Whole = 0
    images: str = ""
    images_source: str = "folder"
    wait: Positive = 600.0
    deadline: Positive = 3600.0
    keys: str = ""
    other_environment: bool = False
    log: str = ""

    @classmethod
    def read(cls, config: Mapping[str, object]) -> FlowerOptions:
        """Read Flower's run configuration, whose keys contain dashes.

        Raises:
            UserError: A key is unknown, or a value has the wrong type or is out of range.
        """
        return build(cls, {key.replace("-", "_"): value for key, value in config.items()})

    def config(self) -> dict[str, object]:
        """Return the run configuration that `read` reads."""
        return {key.replace("_", "-"): value for key, value in describe(self).items()}
