"""Site registry: the name of each site, its client id, and its current node.

A client id belongs to a name for the whole run: it is the index of the name among all sorted names. A node
that reconnects, even with a new node id, is the same client; a second node with a taken name is refused.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from flwr.serverapp import Grid

from atoll.core.audit_log import AuditLog
from atoll.core.errors import UserError
from atoll.core.provenance import version
from atoll.core.tree import Tree
from atoll.core.version import VERSION
from atoll.engines.flower.enrolment import FORMAT, Site, claimed_name, read_site
from atoll.engines.flower.exchange import QUERY, Exchange, Lost
from atoll.engines.flower.known_sites import KnownSites
from atoll.engines.flower.ledger import RECEIVED, received

SECONDS_BETWEEN_LOOKS = 0.3
SECONDS_UNTIL_ASKED_AGAIN = 5.0, 60.0  # shortest and longest pause before a refused node is asked again
SECONDS_BETWEEN_REMINDERS = 30.0
SECONDS_TO_EXAMINE = 60.0  # limit for a node that has come back; then the round begins without it
SECONDS_TO_ANSWER = 300.0  # long, because a site first reads all its images to count them
log = logging.getLogger("flwr")


@dataclass
class SiteRegistry:
    """The sites of a run.

    Attributes:
        grid: Flower's grid.
        recipe: Text of the complete recipe.
        sites: Number of real sites; 0 if the nodes train shares of the recipe's images.
        keys: File of the sites' keys (see `KnownSites`); None to let a node with any registered key choose its
            name.
        other_environment: Whether a site may continue a run on another kind of CPU or with other libraries.
        audit: The coordinator's audit log; None for none.
        federation: Id of the run, under which sites store their states.
        clients: The sites by client id, once all are known.
        turned_away: Nodes that were refused, with the reasons.
    """

    grid: Grid
    recipe: str
    sites: int
    keys: Path | None = None
    other_environment: bool = False
    audit: AuditLog | None = None
    federation: str = field(default_factory=lambda: uuid.uuid4().hex)
    clients: list[Site] = field(default_factory=list)
    turned_away: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ask_at: dict[int, float] = {}  # time at which each asked node is asked again
        self._pauses: dict[int, float] = {}
        self._sessions: dict[int, str] = {}  # when each node that is online connected
        self._waited: set[tuple[int, str]] = set()  # nodes that a round has waited for in this session
        # Of nodes that have not answered yet, with their keys.
        self._hellos: dict[int, tuple[Exchange, str]] = {}
        self._known = KnownSites.read(self.keys) if self.keys is not None else None
        self._misspelt: set[str] = set()  # revoked names that no site has, each of which is told once
        self._remind_at = 0.0

    def gather(self, count: int, seconds: float) -> None:
        """Wait until ``count`` sites have reported their names, and number them.

        Raises:
            UserError: Too few sites connected in time.
        """
        ends = time.monotonic() + seconds
        self._remind_at = time.monotonic() + SECONDS_BETWEEN_REMINDERS
        if self.clients:
            self._await_known(ends)
            return
        found = self._enrol(count, ends)
        if len(found) < count:
            connected = {str(site.node) for site in found.values()}
            refused = [
                f"{one['name']}: {one['reason']}" if one["name"] else one["reason"]
                for one in self.turned_away
                if one["node"] not in connected
            ]
            reasons = "; ".join(dict.fromkeys(refused))
            remedy = "or lower 'sites'" if self.sites else f"in a simulation with num-supernodes={count}"
            raise UserError(
                f"{len(found)} of {count} sites connected within {seconds:g} s "
                f"({', '.join(sorted(found)) or 'none'}{'; refused: ' + reasons if reasons else ''}); "
                f"start the missing nodes, {remedy}"
            )
        names = sorted(found, key=int) if self.sites == 0 else sorted(found)
        self.clients = [found[name] for name in names]

    def _await_known(self, ends: float) -> None:
        """Wait until the sites of an interrupted run are back."""
        while (missing := self._missing()) and time.monotonic() < ends:
            self.refresh()
            self._remind(", ".join(missing))
            time.sleep(SECONDS_BETWEEN_LOOKS)
        if missing:
            log.warning("continuing without %s", ", ".join(missing))

    def _enrol(self, count: int, ends: float) -> dict[str, Site]:
        """Collect the first sites that connect, by name; fewer than ``count`` if the time runs out."""
        found: dict[str, Site] = {}
        while len(found) < count and time.monotonic() < ends:
            for node, site in self._receive():
                if site.name in found and found[site.name].node != node:
                    self._refuse(node, site.name, f"another node already takes part as {site.name!r}")
                elif site.name not in found and len(found) == count:
                    self._refuse(node, site.name, f"the run is for {count} sites, and all have connected")
                else:
                    found[site.name] = site
                    self._record_joined(site)
                    has = f" with {site.train} images" if self.sites else ""
                    log.info("site %s takes part%s (%d of %d)", site.name, has, len(found), count)
            if missing := count - len(found):
                names = sorted(set(self._known.keys) - set(found)) if self._known is not None else []
                self._remind(f"{missing} of {count} sites" + (f" ({', '.join(names)})" if names else ""))
                time.sleep(SECONDS_BETWEEN_LOOKS)
        return found

    def refresh(self) -> None:
        """Ask new nodes for their names, and assign those that have answered to sites.

        If the node of a site has come back, it is examined first, and the round waits for it once, for up to a
        minute; it does not wait for new nodes. The file of the sites' keys is read again, and sites that it
        excludes are notified.
        """
        self._read_keys()
        ends = time.monotonic() + SECONDS_TO_EXAMINE
        self._assign()
        while (back := self._examined()) and time.monotonic() < ends:
            time.sleep(SECONDS_BETWEEN_LOOKS)
            self._assign()
        self._waited |= back

    def _examined(self) -> set[tuple[int, str]]:
        """Nodes of sites that have come back, have not answered, and were not waited for, with their sessions."""
        asked = {site.node for site in self.clients} & self._hellos.keys()
        return {(node, time) for node, time in self._sessions.items() if node in asked} - self._waited

    def _assign(self) -> None:
        """Ask new nodes, and assign those that have answered to sites."""
        sites, nodes = {site.name: site for site in self.clients}, self._nodes()
        for node, site in self._receive():
            known = sites.get(site.name)
            if known is None:
                self._refuse(node, site.name, "it is not one of the sites that the run was started with")
                continue
            # A simulation's nodes draw new keys. With a file of keys, this node has the site's, and the node before
            # is excluded if it has another, even if it is still connected.
            new_key = self.sites > 0 and known.key not in ("", site.key)
            if new_key and self._known is None:
                self._refuse(node, site.name, f"{site.name!r} takes part with another key")
            elif not new_key and known.node not in (None, node) and known.node in nodes:
                self._refuse(node, site.name, f"another node already takes part as {site.name!r}")
            elif reason := known.changed(site, self.other_environment, other_images=not self.sites):
                self._refuse(node, known.name, reason)
            elif known.node != node:
                known.node, known.environment, known.version = node, site.environment, site.version
                known.key = site.key if self._known is not None else known.key
                self._record_joined(known)
                self._judge(known)

    def excluded(self, client: int) -> str | None:
        """Reason why a client no longer gets requests; None if it takes part."""
        site = self.clients[client]
        if site.withdrawn:
            return f"{site.name!r} has withdrawn"
        return self._known.refuse(site.name, site.key) if self._known is not None else None

    def withdraw(self, client: int) -> None:
        """Record that a site has left the run for good."""
        site = self.clients[client]
        if not site.withdrawn:
            site.withdrawn = True
            log.warning("%s has withdrawn and is asked no more", site.name)
            self.record("withdrawn", site=site.name)

    def record(self, event: str, **fields: object) -> None:
        """Write a line into the audit log."""
        if self.audit is not None:
            self.audit.append(event, **fields)

    def connected(self) -> dict[int, int]:
        """Return the current node of each connected client."""
        online = self._nodes()
        nodes = {client: site.node for client, site in enumerate(self.clients)}
        return {
            client: node
            for client, node in nodes.items()
            if node in online and node not in self._hellos and not self.excluded(client)
        }

    def to_json(self) -> str:
        """Serialise the data that a resumed run needs, and that a coordinator may want to read."""
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
            self.clients = [Site.restored(site) for site in record["sites"]]
        except (KeyError, TypeError) as error:
            raise UserError(
                f"sites.json in the run's folder is damaged ({error!r}); restore it from a copy"
            ) from None

    def _missing(self) -> list[str]:
        """Names of the sites of an interrupted run that have not connected again and may, with any key."""
        return [
            site.name
            for site in self.clients
            if site.node is None
            and not site.withdrawn
            and (self._known is None or not self._known.exclude(site.name))
        ]

    def _remind(self, missing: str) -> None:
        if time.monotonic() >= self._remind_at:
            self._remind_at = time.monotonic() + SECONDS_BETWEEN_REMINDERS
            log.info("waiting for %s", missing)

    def _read_keys(self) -> None:
        """Read the keys again, and judge each site by them."""
        if self.keys is not None and self._known is not None:
            self._known = self._known.read_again(self.keys)
            unknown = self._known.unknown(site.name for site in self.clients)
            for name in sorted(unknown - self._misspelt):
                log.warning(
                    "sites.toml revokes %r, which names no site; correct the name if one was meant", name
                )
            self._misspelt |= unknown
        for site in self.clients:
            self._judge(site)

    def _judge(self, site: Site) -> None:
        """Tell a site that the file of keys excludes it, and record this, or that it is admitted again."""
        reason = self._known.refuse(site.name, site.key) if self._known is not None else None
        if reason and not site.excluded:
            log.warning("%s; it is asked no more", reason)
            self.record("revoked", site=site.name, why=reason)
            if site.node in self._nodes():
                farewell = {"federation": self.federation, "reason": reason}
                Exchange(self.grid, SECONDS_TO_ANSWER).send(0, site.node, f"{QUERY}.farewell", farewell)
        elif site.excluded and not reason:
            log.warning("%s is no longer excluded, and takes part again once it is connected", site.name)
            self.record("readmitted", site=site.name)
        site.excluded = reason is not None

    def _record_joined(self, site: Site) -> None:
        if site.version != version():
            log.warning("%s runs Atoll %s, and the coordinator %s", site.name, site.version, version())
        key = hashlib.sha256(bytes.fromhex(site.key)).hexdigest() if site.key else ""
        facts = {"node": str(site.node), "key": key, "images": site.train, "version": site.version}
        self.record("joined", site=site.name, **facts, environment=site.environment)

    def _nodes(self) -> set[int]:
        return set(self.grid.get_node_ids())

    def _receive(self) -> Iterator[tuple[int, Site]]:
        """Yield the sites that nodes report; a refused node is asked again, because its site may fix the cause."""
        request = {
            "format": FORMAT,
            "version": VERSION,
            "federation": self.federation,
            "recipe": self.recipe,
            "sites": self.sites,
        }
        online = {node.node_id: node for node in self.grid.get_nodes()}
        keys = {node: info.public_key.hex() for node, info in online.items()}
        sessions = {node: info.last_activated_at for node, info in online.items()}
        # A node that left may come back with other images, also between two calls.
        for node in [node for node in self._ask_at if self._sessions.get(node) != sessions.get(node)]:
            del self._ask_at[node]
            self._pauses.pop(node, None)
        self._sessions = sessions
        for node in sorted(node for node in keys if self._ask_at.get(node, 0.0) <= time.monotonic()):
            self._ask_at[node] = math.inf
            exchange = Exchange(self.grid, SECONDS_TO_ANSWER)
            exchange.send(node, node, f"{QUERY}.hello", request)
            self._hellos[node] = exchange, keys[node]
        for exchange, key in list(self._hellos.values()):
            for node, answer in exchange.look():
                del self._hellos[node]
                if not isinstance(answer, Lost):
                    about = {"site": claimed_name(answer), "node": str(node), "for": "hello"}
                    self.record(RECEIVED, **about, **received(answer))
                site = read_site(answer, key, node, self.sites > 0)
                if isinstance(site, Site) and self._known is not None:
                    site = self._known.refuse(site.name, key) or site
                if isinstance(site, Site):
                    yield node, site
                elif not self._withdraws(answer, key):
                    self._refuse(node, claimed_name(answer) or self._owner(key), site)

    def _withdraws(self, answer: dict[str, Tree] | Lost, key: str) -> bool:
        """Whether a site of the run reports, when it enrols again, that it has left for good; this is recorded."""
        if isinstance(answer, Lost) or answer.get("withdrawn") is not True:
            return False
        for client, site in enumerate(self.clients):
            if site.name == claimed_name(answer) and self._is_key_of(site, key):
                self.withdraw(client)
                return True
        return False

    def _owner(self, key: str) -> str:
        """Name of the site that has a key; empty if it is not known."""
        if self._known is not None:
            return self._known.owner(key)
        return next((site.name for site in self.clients if key and site.key == key), "")

    def _is_key_of(self, site: Site, key: str) -> bool:
        """Whether a node with this key speaks for a site."""
        return site.key in ("", key) if self._known is None else not self._known.refuse(site.name, key)

    def _refuse(self, node: int, name: str, reason: str) -> None:
        """Log a refusal once, and ask again after increasing pauses, because each request starts a process."""
        for site in self.clients:
            if site.node == node:  # the site was accepted before its node restarted
                site.node = None
        first, longest = SECONDS_UNTIL_ASKED_AGAIN
        pause = self._pauses.get(node, first)
        self._ask_at[node] = time.monotonic() + pause
        self._pauses[node] = min(2 * pause, longest)
        record = {"name": name, "node": str(node), "reason": reason}
        if record not in self.turned_away:
            who = f", with the name {name!r}," if name else ""
            log.warning("node %d%s cannot take part: %s", node, who, reason)
            self.turned_away.append(record)
            self.record("refused", **record)
