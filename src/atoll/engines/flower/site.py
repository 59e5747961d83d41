"""Site side: the site's images, its state on disk, and its answers to the coordinator's requests.

No state is kept in memory between two requests, because Flower may start a process for each. The agreed data are in
a file, and so is a client state for each round (see `atoll.engines.client_states`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from atoll.aggregation.secure_sum import SecureSum
from atoll.components.base import Deployment
from atoll.core.environment import environment
from atoll.core.errors import UserError
from atoll.core.process_state import standard_settings
from atoll.core.provenance import version
from atoll.core.text import clean, plural
from atoll.core.threads import threads
from atoll.core.tree import Tree, map_tensors, save
from atoll.core.version import VERSION
from atoll.data.images import ImageSet
from atoll.data.sources import Splits, load_data
from atoll.engines.client import train_client
from atoll.engines.client_states import ClientStates
from atoll.engines.data_parallel import Ranks, train_together
from atoll.engines.federation import Federation
from atoll.engines.flower.agreed import Agreed, client_side, digest_of, site_partition
from atoll.engines.flower.enrolment import FORMAT
from atoll.engines.flower.launcher import launch
from atoll.engines.flower.ledger import PRIVACY, UPDATE, updates_sent
from atoll.engines.flower.policy import Policy
from atoll.engines.flower.secure_site import masked_update
from atoll.engines.flower.site_errors import SiteError
from atoll.engines.flower.site_images import check_images
from atoll.engines.flower.site_options import SiteOptions
from atoll.evaluation import evaluate
from atoll.recipe.recipe import read_recipe

log = logging.getLogger("flwr")


@dataclass(frozen=True)
class SiteSide:
    """Answers the coordinator's requests.

    Attributes:
        options: The node's configuration.
        together: Whether this process trains together with the others of its process group. Only the first of these
            keeps the client state and answers.
    """

    options: SiteOptions
    together: bool = False

    def hello(self, request: Tree) -> Tree:
        """Report the site's name, the number of its images, and their classes."""
        theirs = request.get("version", f"with messages of format {request['format']}")
        if theirs != VERSION:
            return {"lost": f"the coordinator runs Atoll {theirs}, and this site {VERSION}; install the same"}
        if request["format"] != FORMAT:  # between two commits of one version
            return {
                "lost": f"the coordinator and this site run Atoll {VERSION}, and their messages have the formats "
                f"{request['format']} and {FORMAT}; install the same commit"
            }
        policy = self.options.read_policy()
        if policy is not None:
            policy.check_text(request["recipe"])
        recipe = read_recipe(request["recipe"])
        if bool(request["sites"]) != bool(self.options.site):
            wanted = "real sites (site=… data=…)" if request["sites"] else "shares of the recipe's images"
            return {"lost": f"the run is for {wanted}, and this node is configured for the other"}
        recipe = self.options.recipe(recipe)
        splits = load_data(recipe.data, recipe.seed) if self.options.site else None
        if splits is not None and len(splits.train) < 2:
            images = plural(len(splits.train), "training image")
            return {"lost": f"site {self.options.site!r} has {images}, needs 2"}
        if policy is not None and splits is not None:
            partition = site_partition(recipe, splits.train, 0, request["sites"])
            policy.check_run(Federation(recipe, splits, partition))
        return {
            "version": version(),
            "environment": environment(recipe.engine.find_device(), recipe.engine.threads),
            "name": self.options.name,
            "train": 0 if splits is None else len(splits.train),
            "test": 0 if splits is None or (held := _held_out(splits)) is None else len(held),
            "classes": [] if splits is None else _classes(splits),
        }

    def farewell(self, request: Tree) -> Tree:
        """Learn that the coordinator will send no more requests."""
        log.warning("the coordinator asks this site no more: %s", clean(request["reason"]))
        return {"farewell": True}

    def secure(self, answer: Callable[[Path, Tree], Tree], request: Tree) -> Tree:
        """Answer a stage of secure aggregation (see `atoll.engines.flower.secure_site`)."""
        if self.agreed(request) is None:
            return {"unprepared": True}
        self._policy(request)
        return answer(self.folder_of(request), request)

    def train(self, request: Tree) -> Tree:
        """Train this site's client for one round."""
        agreed = self.agreed(request)
        if agreed is None:
            return {"unprepared": True}
        if self.options.launcher:
            return launch(self.options, self.folder_of(request), request)
        message = request["message"]
        policy = self._policy(request)
        opened = client_side(agreed, self.options, message["client"])
        federation, client = opened.federation, opened.client
        self._check_images(request, federation.splits, message["kept"])
        if policy is not None:
            sent_before = updates_sent(self.options.audit_log, opened.recipe_digest, request["federation"])
            policy.check_updates_sent(sent_before)
        with standard_settings(), threads(federation.recipe.engine.threads):
            states = self._states(request)
            retained = None
            if stateful := federation.recipe.stateful:
                try:
                    retained = states.load(message["client"], message["kept"])
                except UserError as error:
                    return self._lost_state(request["federation"], message["kept"], error)
            data = federation.client_data(message["client"])
            if self.together:
                ranks = Ranks(client.networks["encoder"])
                update, state = train_together(ranks, client, message, retained, data)
                if ranks.rank:
                    return {}
            else:
                update, state = train_client(client, message, retained, data)
            sent = map_tensors(lambda tensor: tensor.cpu(), update)
            if policy is not None:
                sent = policy.outgoing(sent, client.context.received)
            if isinstance(client.method.aggregation, SecureSum):
                sent = masked_update(self.folder_of(request), request, sent, client)
            if stateful:
                states.save(message["client"], message["round"], state)
                states.prune({message["client"]: request["needed"]})
            privacy = asdict(policy.privacy) if policy is not None and policy.privacy else {}
            return {UPDATE: sent, "recipe": opened.recipe_digest, PRIVACY: privacy}

    def _policy(self, request: Tree) -> Policy | None:
        """Return the owner's policy, after checking that it allows a round now, with its cohort; None if unset."""
        policy = self.options.read_policy()
        if policy is not None:
            policy.check_now()
            policy.check_cohort(_cohort(request))
        return policy

    def evaluate(self, request: Tree) -> Tree:
        """Evaluate a model on this site's held-out images; the answer contains only numbers."""
        agreed = self.agreed(request)
        if agreed is None:
            return {"unprepared": True}
        client, valid = request["client"], request["kept"]
        policy = self.options.read_policy()
        if policy is not None:
            policy.check_now()
            if not policy.sends_results:
                return {"results": {}, "images": 0}
        federation = client_side(agreed, self.options, client).federation
        recipe, splits = federation.recipe, federation.splits
        self._check_images(request, splits, valid)
        held = _held_out(splits)
        if held is None:
            return {"results": {}, "images": 0}
        with standard_settings(), threads(recipe.engine.threads):
            retained = None
            if recipe.composed.personalises(recipe.train):
                try:
                    retained = self._states(request).load(client, valid)
                except UserError as error:
                    return self._lost_state(request["federation"], valid, error)
            weights = recipe.composed.personal(Deployment({"": request["model"]}), client, retained)
            encoder = federation.load(weights)
            protocols = recipe.evaluation.at_end if request["final"] else recipe.evaluation.during
            results = evaluate(
                encoder, splits.train, held, federation.views, recipe.evaluation, seed=recipe.seed,
                protocols=protocols,
            )  # fmt: skip
        numbers = {name: value for name, value in results.items() if type(value) in (int, float)}
        return {"results": numbers, "images": len(held)}

    def agreed(self, request: Tree) -> Agreed | None:
        """File of the agreed data, written if the request contains them; None if the site does not have them."""
        digest = _id(request, "digest")
        agreed = Agreed(digest, self.folder_of(request) / f"agreed-{digest}.safetensors")
        if "agreed" in request and not agreed.path.is_file():
            if digest_of(request["agreed"]) != digest:
                raise SiteError(_unfit("an 'agreed' that does not fit its 'digest'"))
            save(agreed.path, request["agreed"])
        return agreed if agreed.path.is_file() else None

    def _check_images(self, request: Tree, splits: Splits, accepted: int) -> None:
        """Refuse to go on with other images once a round, ``accepted``, has counted this site's."""
        if self.options.site:
            check_images(self.folder_of(request), splits, begun=accepted > 0)

    def _lost_state(self, federation: str, round: int, error: UserError) -> Tree:
        """Answer that the client state is lost; the client is reset only if the site's configuration allows it.

        The method may depend on the client state, and the most common cause is a disk that is not mounted.
        """
        log.error("%s", error)
        lost = (
            f"the client state of {self.options.name!r} after round {round} is lost (the site's own log says which "
            "file)"
        )
        if self.options.reset == federation:
            return {
                "lost": f"{lost}; the client is reset and starts again when it is next selected",
                "reset": True,
            }
        return {"lost": f'{lost}; restore it, or reset the client with reset="{federation}" in --node-config'}

    def _states(self, request: Tree) -> ClientStates:
        return ClientStates(self.folder_of(request) / "states")

    def folder_of(self, request: Tree) -> Path:
        """Folder of the run at this site."""
        return self.options.folder / _id(request, "federation") / self.options.name


def _cohort(request: Tree) -> int | None:
    """Number of clients of a secure sum, according to a stage's request; None if the request does not show it."""
    seen = []
    if "stayed" in request:
        seen.append(len(set(request["stayed"])))
    if "shares" in request:  # of the others
        seen.append(len(request["shares"]) + 1)
    if "keys" in request:
        seen.append(len(request["keys"]))
    return min(seen, default=None)


def _classes(splits: Splits) -> list[str]:
    """Classes of the training images, then those that only held-out images have."""
    held = (images for images in (splits.train, splits.test, splits.validation) if images is not None)
    return list(dict.fromkeys(name for images in held for name in images.classes))


def _held_out(splits: Splits) -> ImageSet | None:
    """The held-out images on which this site measures; None if there are none."""
    split, images = splits.held_out
    return None if split == "train" else images


def _id(request: Tree, field: str) -> str:
    """An id from the coordinator; it becomes part of a path, so only hexadecimal digits are allowed."""
    value = request.get(field)
    if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{32}", value):
        raise SiteError(_unfit(f"no valid {field!r}"))
    return value


def _unfit(fault: str) -> str:
    return (
        f"the coordinator's request has {fault}; install the coordinator's version of Atoll on both sides; if it "
        "is the same already, start the run again"
    )
