"""A node's configuration: the site's name, the places of its images and its state, and its policy."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from atoll.core.audit_log import AuditLog
from atoll.core.devices import find_device
from atoll.core.errors import UserError, did_you_mean
from atoll.core.files import expand_home
from atoll.data.options import DataOptions
from atoll.engines.flower.enrolment import is_site_name
from atoll.engines.flower.policy import Policy
from atoll.engines.flower.site_errors import SiteError
from atoll.recipe.recipe import Recipe

# Keys of a node's configuration.
WORDS = ("site", "data", "source", "state", "device", "launcher", "reset", "policy")
OLD_WORDS = {"afresh": "reset"}  # Atoll 0.1's
NUMBERS = ("partition-id", "num-partitions")  # keys that Flower's simulation adds


@dataclass(frozen=True)
class SiteOptions:
    """A node's configuration, from ``flower-supernode --node-config``.

    Attributes:
        site: Permanent name of the site; empty if the node trains a share of the recipe's images.
        data: Folder of the site's images.
        source: Format of that folder (see the recipe's ``data.source``): ``"images"`` needs no labels, ``"folder"``
            has a subfolder for each class.
        state: Folder of the site's persistent state; empty for ``$ATOLL_STATE``, or ``~/.atoll/state``.
        device: Device of the computation; empty for the recipe's.
        launcher: Command that starts several processes, which train the client together (see
            `atoll.engines.flower.launcher`), such as ``"torchrun --standalone --nproc-per-node 4"``; empty for
            none.
        reset: Id of the run in which the site may reset its client if the client state is lost; the error about
            the loss contains this id. Empty for none.
        policy: File of the site's policy (see `Policy`); empty for the default policy, which allows every recipe
            that names no code.
        share: Number of the share that the node trains; Flower's simulation sets it.
    """

    site: str = ""
    data: str = ""
    source: str = "images"
    state: str = ""
    device: str = ""
    launcher: str = ""
    reset: str = ""
    policy: str = ""
    share: int | None = None

    @classmethod
    def read(cls, config: Mapping[str, bool | int | float | str]) -> SiteOptions:
        """Read Flower's node configuration.

        Raises:
            SiteError: A key is unknown, the site has no name or an invalid one, or it has no folder of images.
        """
        config = {OLD_WORDS.get(key, key): value for key, value in config.items()}
        for key in config:
            if key not in (*WORDS, *NUMBERS):
                raise SiteError(
                    f"the node's configuration has an unknown {key!r}; {did_you_mean(key, WORDS)}"
                )
        fields = {name: str(config[name]) for name in WORDS if name in config}
        share = config.get("partition-id")
        options = cls(**fields, share=None if share is None else int(share))
        if not options.site and options.share is None:
            raise SiteError('the node\'s configuration lacks a name: add site="NAME" to --node-config')
        if not is_site_name(options.name):
            raise SiteError(
                f"{options.site!r} cannot be a site's name: use up to 100 letters, digits, blanks, '-', '_' and "
                "'.', and begin with a letter or a digit"
            )
        if options.site and not options.data:
            raise SiteError(f'site {options.site!r} has no images: add data="FOLDER" to --node-config')
        return options

    @property
    def name(self) -> str:
        """Name of the site, or number of the share."""
        return self.site or str(self.share)

    @property
    def folder(self) -> Path:
        """Folder of the site's state."""
        given = self.state or os.environ.get("ATOLL_STATE", "~/.atoll/state")
        return expand_home(given, 'add state="FOLDER" to --node-config')

    @property
    def audit_log(self) -> AuditLog | None:
        """The site's audit log; None for a share, whose node and coordinator have one owner."""
        return AuditLog(self.folder / f"audit-{self.site}.jsonl") if self.site else None

    def read_policy(self) -> Policy | None:
        """Read the site's policy; None for a share.

        Raises:
            SiteError: The file cannot be read, or is no policy.
        """
        if not self.site:
            return None
        try:
            return Policy.read(expand_home(self.policy)) if self.policy else Policy()
        except UserError as error:
            raise SiteError(
                "the site's policy cannot be read; the site's own log says why, and its owner corrects the file"
            ) from error

    def recipe(self, recipe: Recipe) -> Recipe:
        """Replace the images and the device of a recipe by the site's.

        Raises:
            UserError: The site names a device that is not there.
        """
        if self.device:
            find_device(self.device, "device in the --node-config")
        engine = recipe.engine.on(self.device) if self.device else recipe.engine.of_a_node()
        if not self.site:
            return replace(recipe, engine=engine)
        data = replace(
            recipe.data,
            source=self.source,
            path=self.data,
            limit=None,
            # The site also decides which images of the folder are held out.
            train_split=DataOptions.train_split,
            test_split=DataOptions.test_split,
        )
        return replace(recipe, data=data, engine=engine)
