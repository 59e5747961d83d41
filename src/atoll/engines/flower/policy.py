"""A site's policy: what its owner allows, checked by the node itself before anything leaves (``policy.toml``).

    recipes = ["3f1c…"]            # SHA-256 of a recipe, as `atoll egress` prints it
    egress = ["weights", "losses", "samples"]
    max_bytes = 50_000_000         # of one answer
    max_rounds = 200
    min_cohort = 3
    hours = "20:00-06:00"

    [modules]
    "my_loss" = "9b2e…"            # SHA-256 of my_loss.py

    [privacy]
    clip = 1.0
    noise_multiplier = 2.0

A missing key sets no restriction, except `modules`: code that is not listed is refused. The file is read for every
request, so a change applies from the next request on.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, time
from pathlib import Path
from typing import Annotated

from atoll.components.component import declares_slice
from atoll.components.declaration import declared_leaves
from atoll.core.config import Options, build, parse_toml
from atoll.core.errors import UserError
from atoll.core.files import read_bytes
from atoll.core.schema import AtLeast, Count
from atoll.core.tree import Tree, Weights, num_bytes
from atoll.engines.federation import Federation
from atoll.engines.flower.local_privacy import LocalPrivacy
from atoll.engines.flower.site_errors import SiteError
from atoll.engines.update_checks import declares_all, update_spec
from atoll.recipe.recipe import names_of_code, recipe_digest

INSTALLED = "installed"  # in place of a module's SHA-256
RESULTS = "results"  # the entry of `egress` for the results on held-out images


class PolicyError(SiteError):
    """A request that the site's policy refuses."""


class WithdrawnError(PolicyError):
    """The site no longer takes part."""


@dataclass(frozen=True)
class Policy(Options, section="policy"):
    """What a site allows.

    Attributes:
        recipes: Recipes that may run, each by the SHA-256 that ``atoll egress`` prints.
        egress: The entries that an update may contain, as ``atoll egress`` lists them: ``"weights"``, ``"losses"``,
            ``"samples"``, ``"parts.NAME"`` …; and ``"results"``, the numbers that the site measures on its held-out
            images.
        max_bytes: Maximum size of an answer in bytes.
        max_rounds: Maximum number of updates that leave the site for a recipe, over all its runs, and in a run,
            whose recipe changes when it is extended; a round that runs again counts again.
        min_cohort: Minimum number of clients whose updates are aggregated, even if only the recipe's minimum
            (``train.min_accepted``) is accepted.
        hours: The hours in which the site trains and evaluates, in local time, such as ``"20:00-06:00"``.
        modules: Python modules that a recipe may name as ``module:attribute``, with the SHA-256 of the file, or
            ``"installed"`` for a module of a package that the site has installed itself.
        privacy: Differential privacy that the site applies to each of its updates.
        withdrawn: The site no longer takes part in any run.
    """

    recipes: tuple[str, ...] | None = None
    egress: tuple[str, ...] | None = None
    max_bytes: Count | None = None
    max_rounds: Count | None = None
    min_cohort: Annotated[int, AtLeast(1)] = 1
    hours: str | None = None
    modules: dict[str, str] = field(default_factory=dict)
    privacy: LocalPrivacy | None = None
    withdrawn: bool = False

    def __post_init__(self) -> None:
        """Check the fields, including the hours."""
        super().__post_init__()
        if self.hours is not None:
            _hours(self.hours)

    @classmethod
    def read(cls, path: Path) -> Policy:
        """Read a policy's file.

        Raises:
            UserError: The file cannot be read, or is not a policy.
        """
        return build(cls, parse_toml(read_bytes(path), str(path)), file=path)

    def check_text(self, recipe: str) -> None:
        """Check a recipe before it is parsed, because parsing imports the modules that it names.

        Raises:
            PolicyError: The recipe or one of its modules is not allowed.
        """
        self._check_withdrawn()
        digest = recipe_digest(recipe)
        if self.recipes is not None and digest not in map(str.lower, self.recipes):
            raise PolicyError(
                f"the site's policy does not list this recipe ({digest}); its owner adds the hash to recipes in "
                "policy.toml after reading `atoll egress`"
            )
        for module in sorted(set(_modules(recipe))):
            allowed = self.modules.get(module)
            if allowed is None:
                raise PolicyError(
                    f"the recipe names the module {module!r}, which the site's policy does not list under [modules]"
                )
            _check_module(module, allowed)

    def check_run(self, federation: Federation) -> None:
        """Check a recipe's demands, once its networks are built.

        Raises:
            PolicyError: The recipe asks for more than the site allows.
        """
        recipe, method = federation.recipe, federation.recipe.composed
        if self.max_rounds is not None and recipe.train.rounds > self.max_rounds:
            raise PolicyError(
                f"the recipe has {recipe.train.rounds} rounds, and the site's policy allows {self.max_rounds}"
            )
        cohort = federation.setting.cohort_size
        clients = method.aggregation.fewest_clients(federation.setting)
        fewest = max(1, math.ceil(recipe.train.min_accepted * clients))
        if fewest < self.min_cohort:
            raise PolicyError(
                f"a round of this recipe may aggregate only {fewest} of {cohort} updates, and the site's policy "
                f"asks for {self.min_cohort}; raise train.participation or train.min_accepted"
            )
        if self.max_bytes is not None:
            size = _most_bytes(federation)
            if size is None or size > self.max_bytes:
                words = "an unknown number of" if size is None else f"up to {size:,}"
                raise PolicyError(
                    f"an update of this recipe has {words} bytes, and the site's policy allows {self.max_bytes:,}"
                )
        if self.egress is not None:
            losses = () if self.privacy else ("losses",)
            numbers = ("weights", *losses, *method.aggregation.statistics)
            parts = [
                f"parts.{part.name}"
                for part in method.components
                if not declares_slice(type(part)) or part.declares(federation.setting) is not None
            ]
            self._check_names([*numbers, *parts])
        if self.privacy and (reason := self.privacy.refuse(method, federation.setting)):
            raise PolicyError(f"the site's policy adds noise to its updates, and this recipe {reason}")

    def check_now(self, now: datetime | None = None) -> None:
        """Check that the site takes part at this time.

        Raises:
            PolicyError: It is outside the site's hours, or the site has withdrawn.
        """
        self._check_withdrawn()
        if self.hours is None:
            return
        start, end = _hours(self.hours)
        now = (now or datetime.now()).astimezone()  # in the machine's own time zone, which a sentence names
        clock = now.time()
        inside = start <= clock < end if start < end else clock >= start or clock < end
        if not inside:
            raise PolicyError(f"the site works from {self.hours}, and its clock says {now:%H:%M %Z}")

    def check_cohort(self, clients: int | None) -> None:
        """Check the number of clients of a secure sum, as the site sees them; None if it sees none.

        Raises:
            PolicyError: There are too few clients.
        """
        if clients is not None and clients < self.min_cohort:
            raise PolicyError(
                f"{clients} clients take part in the sum, and the site's policy asks for {self.min_cohort}"
            )

    def check_updates_sent(self, sent: int) -> None:
        """Check that the site may send another update for a recipe.

        Raises:
            PolicyError: It has already sent as many updates as it allows.
        """
        if self.max_rounds is not None and sent >= self.max_rounds:
            raise PolicyError(
                f"the site has sent {sent} updates for this recipe, as many as its policy allows"
            )

    def outgoing(self, update: dict[str, Tree], received: Weights) -> dict[str, Tree]:
        """Return the update as it may leave the site: with noise, if the policy requires it, and checked.

        Args:
            update: The update that results from the training.
            received: The weights from which the training started.

        Raises:
            PolicyError: It contains more than the site allows.
        """
        if self.privacy is not None:
            if update["parts"]:
                raise PolicyError(
                    "the site's policy adds noise to its weights, and the update has more than these"
                )
            weights = self.privacy.apply(update["weights"], received)
            update = {**update, "weights": weights, "losses": {}}
        names = [name for name in update if name != "parts" and (name != "losses" or update[name])]
        self._check_names([*names, *(f"parts.{name}" for name in update["parts"])])
        size = num_bytes(update)
        if self.max_bytes is not None and size > self.max_bytes:
            raise PolicyError(
                f"the update has {size:,} bytes, and the site's policy allows {self.max_bytes:,}"
            )
        return update

    @property
    def sends_results(self) -> bool:
        """Whether results on the held-out images may leave the site."""
        return self.privacy is None and (self.egress is None or RESULTS in self.egress)

    def _check_withdrawn(self) -> None:
        if self.withdrawn:
            raise WithdrawnError("the site has withdrawn")

    def _check_names(self, names: list[str]) -> None:
        if self.egress is None:
            return
        for name in names:
            if name not in self.egress:
                raise PolicyError(
                    f"an update of this recipe contains {name!r}, which the site's policy does not list"
                )


def _most_bytes(federation: Federation) -> int | None:
    """Maximum bytes of an update, counted as in ``atoll egress``; None if it may contain undeclared data."""
    method = federation.recipe.composed
    if not declares_all(method):
        return None
    spec = update_spec(method, federation.setting)
    return sum(leaf.num_bytes for _, leaf in declared_leaves(spec, federation.sent_weights(), ""))


def _modules(recipe: str) -> Iterator[str]:
    """Modules that a recipe names as ``module:attribute``."""
    try:
        table = parse_toml(recipe, "the coordinator's recipe")
    except UserError as error:
        raise PolicyError(str(error)) from None
    for name in names_of_code(table):
        yield name.partition(":")[0]


def _check_module(module: str, allowed: str) -> None:
    """Check a module's file without importing it."""
    if not all(word.isidentifier() for word in module.split(".")):
        raise PolicyError(f"the recipe names {module!r}, which cannot be the name of a module")
    top, *inner = module.split(".")  # `find_spec` of a module in a package would import the package
    spec = importlib.util.find_spec(top)
    origin = Path(spec.origin) if spec is not None and spec.origin else None
    if origin is None:
        raise PolicyError(f"the module {top!r}, which the recipe names, is not at the site")
    if allowed == INSTALLED:
        folders = [Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")]
        if not any(origin.resolve().is_relative_to(folder) for folder in folders):
            raise PolicyError(f"the module {top!r} is not installed at the site, and its policy demands that")
    elif inner or (spec is not None and spec.submodule_search_locations):
        raise PolicyError(f"{module!r} is in a package, and the site's policy can list it as installed only")
    elif hashlib.sha256(read_bytes(origin)).hexdigest() != allowed.lower():
        raise PolicyError(f"the file of the module {module!r} is not the one that the site's policy lists")
    else:  # otherwise, bytecode that came with the file would be imported in its place
        Path(importlib.util.cache_from_source(str(origin))).unlink(missing_ok=True)


def _hours(text: str) -> tuple[time, time]:
    first, _, last = text.partition("-")
    wrong = UserError(f'policy.hours = {text!r} is not of the form "20:00-06:00"')
    try:
        start, end = time.fromisoformat(first.strip()), time.fromisoformat(last.strip())
    except ValueError:
        raise wrong from None
    if start.tzinfo or end.tzinfo:  # the local time that they are compared with has no time zone
        raise wrong
    if start == end:
        raise UserError(f"policy.hours = {text!r} ends when it begins; leave it out to allow all hours")
    return start, end
