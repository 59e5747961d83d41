"""Site registry: the name of each site, its client id, and its current node.

A client id belongs to a name for the whole run: it is the index of the name among all sorted names. A node
that reconnects, even with a new node id, is the same client; a second node with a taken name is refused.
"""

from __future__ import annotations

import json
import logging
import math
import re
import reprlib
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field

from flwr.serverapp import Grid

from atoll.core.errors import UserError
from atoll.core.text import clean, one_line
from atoll.core.tree import Tree
from atoll.engines.flower.exchange import QUERY, Exchange, Lost
from atoll.engines.update_checks import is_count

FORMAT = 2  # of requests and answers; both sides must use the same
SECONDS_BETWEEN_LOOKS = 0.3
SECONDS_UNTIL_ASKED_AGAIN = 5.0, 60.0  # shortest and longest pause before a refused node is asked again
SECONDS_TO_ANSWER = 300.0  # long, because a site first reads all its images to count them
MOST_CLASSES = 100_000
log = logging.getLogger("flwr")


@dataclass
class Site:
    """One site.

    Attributes:
        name: Name in its node's configuration, or the number of its share.
        key: Public key of its node in hex; empty if nodes are not authenticated.
        train: Number of its training images.
        test: Number of its held-out images.
        classes: Names of its classes, if its images have labels.
        node: Id of its current node; None if none has connected to this process yet.
    """

    name: str
    key: str
    train: int
    test: int
    classes: list[str]
    node: int | None = None


@dataclass
class SiteRegistry:
    """The sites of a run.

    Attributes:
        grid: Flower's grid.
        recipe: Text of the complete recipe.
        sites: Number of real sites; 0 if the nodes train shares of the recipe's images.
        federation: Id of the run, under which sites store their states.
        clients: The sites by client id, once all are known.
        turned_away: Nodes that were refused, with the reasons.
    """

    grid: Grid
    recipe: str
    sites: int
    federation: str = field(default_factory=lambda: uuid.uuid4().hex)
    clients: list[Site] = field(default_factory=list)
    turned_away: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ask_at: dict[int, float] = {}  # time at which each asked node is asked again
        self._pauses: dict[int, float] = {}
        self._hellos: dict[
            int, tuple[Exchange, str]
        ] = {}  # of nodes that have not answered yet, with their keys

    def gather(self, count: int, seconds: float) -> None:
        """Wait until ``count`` sites have reported their names, and number them.

        Raises:
            UserError: Too few sites connected in time.
        """
        ends = time.monotonic() + seconds
        if self.clients:
            while any(site.node is None for site in self.clients) and time.monotonic() < ends:
                self.refresh()
                time.sleep(SECONDS_BETWEEN_LOOKS)
            return
        found: dict[str, Site] = {}
        while len(found) < count and time.monotonic() < ends:
            for node, site in self._receive():
                if site.name in found:
                    self._refuse(node, site.name, f"another node already takes part as {site.name!r}")
                elif len(found) == count:
                    self._refuse(node, site.name, f"the run is for {count} sites, and all have connected")
                else:
                    found[site.name] = site
                    has = f" with {site.train} images" if self.sites else ""
                    log.info("site %s takes part%s (%d of %d)", site.name, has, len(found), count)
            time.sleep(SECONDS_BETWEEN_LOOKS)
        if len(found) < count:
            connected = {str(site.node) for site in found.values()}
            refused = [one["reason"] for one in self.turned_away if one["node"] not in connected]
            reasons = "; ".join(dict.fromkeys(refused))
            remedy = "or lower 'sites'" if self.sites else f"in a simulation with num-supernodes={count}"
            raise UserError(
                f"{len(found)} of {count} sites connected within {seconds:g} s "
                f"({', '.join(sorted(found)) or 'none'}{'; refused: ' + reasons if reasons else ''}); "
                f"start the missing nodes, {remedy}"
            )
        names = sorted(found, key=int) if self.sites == 0 else sorted(found)
        self.clients = [found[name] for name in names]

    def refresh(self) -> None:
        """Ask new nodes for their names, and assign those that have answered to sites; do not wait."""
        sites = {site.name: site for site in self.clients}
        for node, site in self._receive():
            known = sites.get(site.name)
            if known is None:
                self._refuse(node, site.name, "it is not one of the sites that the run was started with")
            elif known.key and known.key != site.key:
                self._refuse(node, site.name, f"{site.name!r} takes part with another key")
            elif known.node is not None and known.node != node and known.node in self._nodes():
                self._refuse(node, site.name, f"another node already takes part as {site.name!r}")
            else:
                known.node = node

    def connected(self) -> dict[int, int]:
        """Return the current node of each connected client."""
        online = self._nodes()
        nodes = {client: site.node for client, site in enumerate(self.clients)}
        return {client: node for client, node in nodes.items() if node is not None and node in online}

    def classes(self) -> list[str]:
        """Return the classes of all sites."""
        lists = [site.classes for site in self.clients]
        if all(names == lists[0] for names in lists):
            return lists[0]
        return sorted({name for names in lists for name in names})

    def to_json(self) -> str:
        """Serialise what a resumed run needs, and what a coordinator may want to read."""
        sites = [{"client": k, **asdict(site)} for k, site in enumerate(self.clients)]
        record = {"federation": self.federation, "sites": sites, "turned_away": self.turned_away}
        return json.dumps(record, indent=1) + "\n"

    def restore(self, record: Mapping[str, Tree]) -> None:
        """Restore the sites of an interrupted run from a record that `to_json` wrote.

        Raises:
            UserError: The record is incomplete.
        """
        try:
            self.federation = str(record["federation"])
            self.clients = [
                Site(site["name"], site["key"], site["train"], site["test"], site["classes"])
                for site in record["sites"]
            ]
        except (KeyError, TypeError) as error:
            raise UserError(
                f"sites.json in the run's folder is damaged ({error!r}); restore it from a copy"
            ) from None

    def _nodes(self) -> set[int]:
        return set(self.grid.get_node_ids())

    def _receive(self) -> Iterator[tuple[int, Site]]:
        """Yield the sites that nodes report; a refused node is asked again, because its site may fix the cause."""
        request = {
            "format": FORMAT,
            "federation": self.federation,
            "recipe": self.recipe,
            "sites": self.sites,
        }
        keys = {node.node_id: node.public_key.hex() for node in self.grid.get_nodes()}
        for node in sorted(node for node in keys if self._ask_at.get(node, 0.0) <= time.monotonic()):
            self._ask_at[node] = math.inf
            exchange = Exchange(self.grid, SECONDS_TO_ANSWER)
            exchange.send(node, node, f"{QUERY}.hello", request)
            self._hellos[node] = exchange, keys[node]
        for exchange, key in list(self._hellos.values()):
            for node, answer in exchange.look():
                del self._hellos[node]
                site = _read(answer, key, node, self.sites > 0)
                if isinstance(site, Site):
                    yield node, site
                else:
                    self._refuse(node, "", site)

    def _refuse(self, node: int, name: str, reason: str) -> None:
        """Log a refusal once, and ask again after increasing pauses, because each request starts a process."""
        first, longest = SECONDS_UNTIL_ASKED_AGAIN
        pause = self._pauses.get(node, first)
        self._ask_at[node] = time.monotonic() + pause
        self._pauses[node] = min(2 * pause, longest)
        record = {"name": name, "node": str(node), "reason": reason}
        if record not in self.turned_away:
            who = f", with the name {name!r}," if name else ""
            log.warning("node %d%s cannot take part: %s", node, who, reason)
            self.turned_away.append(record)


def _read(answer: dict[str, Tree] | Lost, key: str, node: int, real: bool) -> Site | str:
    """Read a site from its answer; if this fails, return the reason. A ``real`` site must have local images."""
    if isinstance(answer, Lost):
        return answer.reason
    if "lost" in answer:
        return one_line(answer["lost"])
    name, train, test, classes = (answer.get(field) for field in ("name", "train", "test", "classes"))
    if not isinstance(name, str) or not is_site_name(name) or not (real or re.fullmatch("[0-9]+", name)):
        return "its answer contains no valid name"
    if not is_count(train, 2 if real else 0) or not is_count(test, 0):
        return f"it reports {reprlib.repr(train)} training and {reprlib.repr(test)} held-out images"
    if not isinstance(classes, list) or len(classes) > MOST_CLASSES or not all(map(_is_class, classes)):
        return "its classes are not a list of names"
    return Site(name, key, train, test, [clean(name) for name in classes], node)


def is_site_name(name: str) -> bool:
    """Whether a name is valid for a site: it appears in logs, reports and paths."""
    return bool(re.fullmatch(r"\w[\w .-]{0,99}", name))


def _is_class(name: Tree) -> bool:
    return isinstance(name, str) and len(name) <= 1000 and name.encode(errors="replace").decode() == name
