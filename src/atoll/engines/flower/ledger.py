"""The lines that a site and its coordinator write into their audit logs (`atoll.core.audit_log`).

Before an answer leaves, the site writes a line with what it sends, by name and bytes, or why it refuses. The answer
contains the line's hash, which the coordinator writes into its own log, so that the site cannot shorten or rewrite
its log unnoticed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from atoll.core.audit_log import AuditLog, is_hash
from atoll.core.errors import RunError
from atoll.core.tree import Tree, named_bytes, num_bytes, placed_bytes
from atoll.engines.callbacks import Callback
from atoll.engines.federation import Federation
from atoll.engines.flower.local_privacy import joint_epsilon
from atoll.engines.record import Record
from atoll.engines.server import Server

ASKED, RECEIVED, LOST = "asked", "received", "lost"  # events at the coordinator
SENT, REFUSED = "sent", "refused"  # outcomes at a site
UPDATE = "update"  # event
PRIVACY = "privacy"  # entry of a site's answer for its own log: the noise in the update
MOST_LETTERS = 2**20  # limit for the names in a line of the coordinator's log; large models have a tenth


def record_answer(
    log: AuditLog,
    kind: str,
    request: Mapping[str, Tree],
    reply: Mapping[str, Tree],
    spent: Mapping[str, object] | None = None,
) -> str | None:
    """Write a site's answer to a request into its audit log.

    Args:
        log: The site's log.
        kind: The kind of request: ``"hello"``, ``"train"`` …
        request: The coordinator's request.
        reply: The answer.
        spent: What `spent` says of the update.

    Returns:
        The hash of the line; None if there was nothing to write, because the site only requested missing data.
    """
    if "unprepared" in reply:
        return None
    facts: dict[str, object] = {"run": request.get("federation"), **round_of(request)}
    if "reason" in request:
        facts["why"] = request["reason"]
    if "lost" in reply:
        return log.append(kind, **facts, outcome=REFUSED, why=reply["lost"])
    if UPDATE in reply:
        kind, sent = UPDATE, reply[UPDATE]
        facts["recipe"] = reply["recipe"]
    else:
        sent = reply
    facts |= spent or {}
    return log.append(kind, **facts, outcome=SENT, bytes=num_bytes(sent), tensors=named_bytes(sent))


def round_of(request: Mapping[str, Tree]) -> dict[str, Tree]:
    """Round of a request, for a line of the log; in requests to train, it is in the message. Empty if unknown."""
    message = request.get("message")
    found = message.get("round") if isinstance(message, Mapping) else request.get("round")
    return {} if found is None else {"round": found}


def updates_sent(log: AuditLog | None, recipe: str, run: str | None = None) -> int:
    """Number of updates that have left a site for a recipe, or in a run.

    Args:
        log: The site's log; None for none.
        recipe: The recipe's digest.
        run: Id of the run, whose recipe has another digest once the run is extended.

    Raises:
        UserError: The log was changed or is damaged.
    """
    lines = _updates(log) if log is not None else ()
    return sum(line.get("recipe") == recipe or (run is not None and line.get("run") == run) for line in lines)


def spent(log: AuditLog, privacy: Mapping[str, float]) -> dict[str, object]:
    """Describe the privacy of an update that is about to leave a site, for its line.

    Args:
        log: The site's log.
        privacy: The fields of the `LocalPrivacy` with which the site made the update; empty if it added no noise.

    Returns:
        These fields, and ε of all updates of the log and this one, at this one's δ. ε is None, for infinity, if
        updates have left without noise; their number is returned too. Empty if this one has no noise either.

    Raises:
        UserError: The log was changed or is damaged.
    """
    if not privacy:
        return {}
    earlier = [line.get("noise_multiplier") for line in _updates(log)]
    noise = [z for z in earlier if isinstance(z, float)]
    if bare := len(earlier) - len(noise):
        return {**privacy, "epsilon": None, "updates_without_noise": bare}
    return {**privacy, "epsilon": joint_epsilon([*noise, privacy["noise_multiplier"]], privacy["delta"])}


def _updates(log: AuditLog) -> Iterator[dict[str, object]]:
    """The lines of the updates that have left a site. Of an incomplete line, nothing has left."""
    lines = (entry.fields for entry in log.entries(incomplete=True))
    return (line for line in lines if line["event"] == UPDATE and line["outcome"] == SENT)


def received(answer: Mapping[str, Tree]) -> dict[str, object]:
    """Describe a site's answer for the coordinator's audit log: its size, its tensors, and the site's own line."""
    body = answer.get(UPDATE, {key: value for key, value in answer.items() if key != "log"})
    line = answer.get("log")
    known = isinstance(line, str) and is_hash(line)
    return {"bytes": num_bytes(body), "tensors": _tensors(body), **({"site_log": line} if known else {})}


def _tensors(body: Tree) -> dict[str, int]:
    """Bytes of each tensor and number of an answer that has not been checked yet.

    A long name may occur once in the answer, but would be repeated here for each number below it. Places whose
    names are equal once they are joined, which only a hostile answer has, are counted together.
    """
    found: Counter[str] = Counter()
    letters = 0
    for place, size in placed_bytes(body):
        letters += sum(map(len, place))
        if letters > MOST_LETTERS:
            found["…"] += num_bytes(body) - found.total()
            break
        found[".".join(place)] += size
    return dict(found)


class Recorder(Protocol):
    """Writes a line into the audit log."""

    def __call__(self, event: str, **fields: object) -> None:
        """Write the line."""
        ...


class RoundLedger(Callback):
    """Callback that writes into the audit log whose updates a round accepted or refused, and why.

    Args:
        record: Writes a line into the log.
        names: Name of each client's site.
    """

    def __init__(self, record: Recorder, names: Sequence[str]) -> None:
        self._record = record
        self._names = names

    def begin(self, federation: Federation, server: Server) -> None:
        """Record the start of a process."""
        self._server = server
        self._record("begun", after_round=server.round)

    def round(self, record: Record, line: dict[str, object]) -> None:
        """Record a complete round."""
        reasons = {
            what: {self._names[int(client)]: reason for client, reason in found.items()}
            for what, found in (("refused", record.refused), ("lost", record.lost))
        }
        valid = self._server.valid  # the last accepted round of each client
        accepted = [self._names[client] for client in sorted(valid) if valid[client] == record.round]
        self._record("round", round=record.round, accepted=accepted, **reasons)

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Record a run that fails in the block."""
        try:
            yield
        except RunError as error:
            self._record("failed", why=str(error))
            raise
