"""Site side: the site's images, its state on disk, and its answers to the coordinator's requests.

No state is kept in memory between two requests, because Flower may start a process for each. What the run agreed on
is a file, and a client state is one file per round (see `atoll.engines.client_states`).
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from atoll.components.base import Deployment
from atoll.core.audit_log import AuditLog
from atoll.core.environment import environment
from atoll.core.errors import UserError, did_you_mean
from atoll.core.provenance import version
from atoll.core.text import clean
from atoll.core.threads import threads
from atoll.core.tree import Tree, load, map_tensors, pack, save
from atoll.core.version import VERSION
from atoll.data.images import ImageSet
from atoll.data.partition.partition import Partition
from atoll.data.sources import load_data
from atoll.engines.client import Client, train_client
from atoll.engines.client_states import ClientStates
from atoll.engines.federation import Federation
from atoll.engines.flower.enrolment import FORMAT, is_site_name
from atoll.engines.flower.ledger import updates_sent
from atoll.engines.flower.policy import Policy
from atoll.evaluation import evaluate
from atoll.recipe.recipe import Recipe, recipe_digest

RecipeReader = Callable[[str], Recipe]
WORDS = ("site", "data", "source", "state", "device", "afresh", "policy")  # keys of a node's configuration
log = logging.getLogger("flwr")
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
        afresh: Id of the run in which the site may reset its client if the client state is lost; the error about
            the loss contains this id. Empty for none.
        policy: File of the site's policy (see `Policy`); empty for the default, which allows every recipe without
            modules of its own.
        share: Number of the share that the node trains; Flower sets it in simulation.
    """

    site: str = ""
    data: str = ""
    source: str = "images"
    state: str = ""
    device: str = ""
    afresh: str = ""
    policy: str = ""
    share: int | None = None

    @classmethod
    def read(cls, config: Mapping[str, bool | int | float | str]) -> SiteOptions:
        """Read Flower's node configuration.

        Raises:
            UserError: A key is unknown, the site has no name or an invalid one, or it has no folder of images.
        """
        for key in config:
            if key not in (*WORDS, *NUMBERS):
                raise UserError(
                    f"the node's configuration has an unknown {key!r}; {did_you_mean(key, WORDS)}"
                )
        fields = {name: str(config[name]) for name in WORDS if name in config}
        share = config.get("partition-id")
        options = cls(**fields, share=None if share is None else int(share))
        if not options.site and options.share is None:
            raise UserError('the node\'s configuration lacks a name: add site="NAME" to --node-config')
        if not is_site_name(options.name):
            raise UserError(
                f"{options.site!r} cannot be a site's name: use up to 100 letters, digits, '-', '_' and '.'"
            )
        if options.site and not options.data:
            raise UserError(f'site {options.site!r} has no images: add data="FOLDER" to --node-config')
        return options

    @property
    def name(self) -> str:
        """Name of the site, or number of the share."""
        return self.site or str(self.share)

    @property
    def folder(self) -> Path:
        """Folder of the site's state."""
        return Path(self.state or os.environ.get("ATOLL_STATE", "~/.atoll/state")).expanduser()

    @property
    def audit_log(self) -> AuditLog | None:
        """The site's audit log; None for a share, whose node and coordinator have one owner."""
        return AuditLog(self.folder / f"audit-{self.site}.jsonl") if self.site else None

    def read_policy(self) -> Policy | None:
        """Read the site's policy; None for a share."""
        if not self.site:
            return None
        return Policy.read(Path(self.policy)) if self.policy else Policy()

    def recipe(self, recipe: Recipe) -> Recipe:
        """Replace the images and the device of a recipe by the site's."""
        engine = replace(recipe.engine, device=self.device) if self.device else recipe.engine
        if not self.site:
            return replace(recipe, engine=engine)
        data = replace(recipe.data, source=self.source, path=self.data, limit=None)
        return replace(recipe, data=data, engine=engine)


@dataclass(frozen=True)
class SiteSide:
    """Answers the coordinator's requests.

    Attributes:
        options: The node's configuration.
        read_recipe: Parses the text of a recipe.
    """

    options: SiteOptions
    read_recipe: RecipeReader

    def hello(self, request: Tree) -> Tree:
        """Report the site's name, the number of its images, and their classes."""
        if request["format"] != FORMAT or request["version"] != VERSION:
            theirs = request.get("version", f"with messages of format {request['format']}")
            return {"lost": f"the coordinator runs Atoll {theirs}, and this site {VERSION}; install the same"}
        policy = self.options.read_policy()
        if policy is not None:
            policy.check_text(request["recipe"])
        recipe = self.read_recipe(request["recipe"])
        if bool(request["sites"]) != bool(self.options.site):
            wanted = "real sites (site=… data=…)" if request["sites"] else "shares of the recipe's images"
            return {"lost": f"the run is for {wanted}, and this node is configured for the other"}
        splits = load_data(self.options.recipe(recipe).data, recipe.seed) if self.options.site else None
        if splits is not None and len(splits.train) < 2:
            return {"lost": f"site {self.options.site!r} has {len(splits.train)} training image(s), needs 2"}
        if policy is not None and splits is not None:
            site = self.options.recipe(recipe)
            partition = _site_partition(site, splits.train, 0, request["sites"])
            policy.check_run(Federation(site, splits, partition))
        engine = self.options.recipe(recipe).engine
        return {
            "version": version(),
            "environment": environment(engine.find_device(), engine.threads),
            "name": self.options.name,
            "train": 0 if splits is None else len(splits.train),
            "test": 0 if splits is None or splits.test is None else len(splits.test),
            "classes": [] if splits is None else list(splits.train.classes),
        }

    def farewell(self, request: Tree) -> Tree:
        """Learn that the coordinator asks this site no more."""
        log.warning("the coordinator asks this site no more: %s", clean(request["reason"]))
        return {"farewell": True}

    def train(self, request: Tree) -> Tree:
        """Train this site's client for one round."""
        agreed = self._agreed(request)
        if agreed is None:
            return {"unprepared": True}
        message = request["message"]
        policy = self.options.read_policy()
        if policy is not None:
            policy.check_now()
        opened = _client_side(agreed, self.options, self.read_recipe, message["client"])
        federation, client = opened.federation, opened.client
        if policy is not None:
            policy.check_updates_sent(updates_sent(self.options.audit_log, opened.recipe_digest))
        with threads(federation.recipe.engine.threads):
            states = self._states(request)
            retained = None
            if stateful := federation.recipe.composed.stateful(federation.recipe.train):
                try:
                    retained = states.load(message["client"], message["kept"])
                except UserError as error:
                    return self._lost_state(request["federation"], message["kept"], error)
            update, state = train_client(client, message, retained, federation.client_data(message["client"]))
            sent = map_tensors(lambda tensor: tensor.cpu(), update)
            if policy is not None:
                sent = policy.outgoing(sent, client.context.received)
            if stateful:
                states.save(message["client"], message["round"], state)
                states.prune({message["client"]: request["needed"]})
            return {"update": sent, "recipe": opened.recipe_digest}

    def evaluate(self, request: Tree) -> Tree:
        """Evaluate a model on this site's held-out images; the answer contains only numbers."""
        agreed = self._agreed(request)
        if agreed is None:
            return {"unprepared": True}
        client, valid = request["client"], request["kept"]
        policy = self.options.read_policy()
        if policy is not None:
            policy.check_now()
            if not policy.sends_results:
                return {"results": {}, "images": 0}
        federation = _client_side(agreed, self.options, self.read_recipe, client).federation
        recipe, splits = federation.recipe, federation.splits
        held = splits.validation if splits.validation is not None else splits.test
        if held is None:
            return {"results": {}, "images": 0}
        with threads(recipe.engine.threads):
            retained = (
                self._states(request).load(client, valid)
                if recipe.composed.personalises(recipe.train)
                else None
            )
            weights = recipe.composed.personal(Deployment({"": request["model"]}), client, retained)
            federation.networks.load_state_dict({**federation.networks.state_dict(), **weights})
            protocols = recipe.evaluation.at_end if request["final"] else recipe.evaluation.during
            results = evaluate(
                federation.encoder, splits.train, held, federation.views, recipe.evaluation, seed=recipe.seed,
                protocols=protocols,
            )  # fmt: skip
        numbers = {name: value for name, value in results.items() if type(value) in (int, float)}
        return {"results": numbers, "images": len(held)}

    def _agreed(self, request: Tree) -> Agreed | None:
        """File of what the run agreed on, written if the request contains it; None if the site does not have it."""
        digest = request["digest"]
        if not re.fullmatch("[0-9a-f]{32}", digest):
            raise UserError("the coordinator's request is malformed")
        agreed = Agreed(digest, self._folder(request) / f"agreed-{digest}.safetensors")
        if "agreed" in request and not agreed.path.is_file():
            if digest_of(request["agreed"]) != digest:
                raise UserError("the coordinator's request is damaged")
            save(agreed.path, request["agreed"])
        return agreed if agreed.path.is_file() else None

    def _lost_state(self, federation: str, round: int, error: UserError) -> Tree:
        """Answer that the client state is lost; the client is reset only if the site's configuration allows it.

        The method may depend on the client state, and the most common cause is a disk that is not mounted.
        """
        lost = f"the client state of {self.options.name!r} after round {round} is lost ({error})"
        if self.options.afresh == federation:
            return {
                "lost": f"{lost}; the client is reset and starts again when it is next selected",
                "afresh": True,
            }
        return {
            "lost": f'{lost}; restore it, or reset the client with afresh="{federation}" in --node-config'
        }

    def _states(self, request: Tree) -> ClientStates:
        return ClientStates(self._folder(request) / "states")

    def _folder(self, request: Tree) -> Path:
        """Folder of the run at this site; its id comes from outside, so only hexadecimal digits are allowed."""
        if not re.fullmatch("[0-9a-f]{32}", request["federation"]):
            raise UserError("the coordinator's request is malformed")
        return self.options.folder / str(request["federation"]) / self.options.name


@dataclass(frozen=True)
class Agreed:
    """File of what a run agreed on: recipe, classes, constants. Files with the same digest are equal."""

    digest: str
    path: Path = field(compare=False)


def digest_of(agreed: Tree) -> str:
    """Digest of what a run agreed on."""
    return hashlib.blake2b(pack(agreed), digest_size=16).hexdigest()


class Opened(NamedTuple):
    """What a site builds from what a run agreed on."""

    federation: Federation
    client: Client
    recipe_digest: str


def _client_side(agreed: Agreed, options: SiteOptions, read_recipe: RecipeReader, client: int) -> Opened:
    if options.site:
        return _open(agreed, options, read_recipe, client)
    return _open(agreed, replace(options, share=None), read_recipe, 0)  # the same for every share


@lru_cache(maxsize=1)  # a process of a simulation answers many requests
def _open(file: Agreed, options: SiteOptions, read_recipe: RecipeReader, client: int) -> Opened:
    try:
        agreed = load(file.path)
    except UserError as error:
        file.path.unlink(missing_ok=True)
        raise UserError(f"{error}; the file was deleted, and the next request brings it again") from None
    policy = options.read_policy()
    if policy is not None:
        policy.check_text(agreed["recipe"])
    recipe = options.recipe(read_recipe(agreed["recipe"]))
    if not options.site:
        federation = Federation(recipe)
    else:
        splits = load_data(recipe.data, recipe.seed)
        for images in (splits.train, splits.test, splits.validation):
            if images is not None:
                _rename_classes(images, agreed["classes"])
        federation = Federation(
            recipe, splits, _site_partition(recipe, splits.train, client, agreed["clients"])
        )
    if policy is not None:
        policy.check_run(federation)
    return Opened(federation, federation.client_side(agreed["constants"]), recipe_digest(agreed["recipe"]))


def _rename_classes(images: ImageSet, classes: list[str]) -> None:
    """Number the labels as the federation does, which may have classes that this site lacks."""
    if images.labels is not None:
        images.labels = torch.tensor([classes.index(name) for name in images.classes])[images.labels]
        images.classes = list(classes)


def _site_partition(recipe: Recipe, images: ImageSet, client: int, clients: int) -> Partition:
    """Partition in which all images belong to this client; a site knows nothing about other clients' images."""
    shares = [torch.arange(len(images) if k == client else 0) for k in range(clients)]
    names = [str(k) for k in range(clients)]
    return Partition(
        shares, names, None, None, recipe.partition, recipe.seed, len(images), images.fingerprint,
        tuple(images.classes),
    )  # fmt: skip
