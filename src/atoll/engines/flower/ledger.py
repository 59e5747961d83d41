"""What a site and its coordinator write into their audit logs (`atoll.core.audit_log`).

A site writes a line for each request before its answer leaves: what it sends, by name and bytes, or why it refused.
The answer carries the line's hash, which the coordinator writes into its own log, so that a site cannot shorten or
rewrite its log unnoticed.
"""

from __future__ import annotations

from collections.abc import Mapping

from atoll.core.audit_log import AuditLog
from atoll.core.tree import Tree, named_bytes, num_bytes

SENT, REFUSED = "sent", "refused"  # outcomes
UPDATE = "update"  # event


def record_answer(
    log: AuditLog, kind: str, request: Mapping[str, Tree], reply: Mapping[str, Tree]
) -> str | None:
    """Write a site's answer to a request into its audit log.

    Args:
        log: The site's log.
        kind: What was asked: ``"hello"``, ``"train"`` …
        request: The coordinator's request.
        reply: The answer.

    Returns:
        The hash of the line; None if there was nothing to write, because the site asked for what it lacks.
    """
    if "unprepared" in reply:
        return None
    facts: dict[str, object] = {"run": request.get("federation")}
    message = request.get("message")
    if isinstance(message, Mapping):
        facts["round"] = message.get("round")
    if "lost" in reply:
        return log.append(kind, **facts, outcome=REFUSED, why=reply["lost"])
    if UPDATE in reply:
        kind, sent = UPDATE, reply[UPDATE]
        facts["recipe"] = reply["recipe"]
    else:
        sent = reply
    return log.append(kind, **facts, outcome=SENT, bytes=num_bytes(sent), tensors=named_bytes(sent))


def updates_sent(log: AuditLog | None, recipe: str) -> int:
    """Number of updates that have left a site for a recipe, by its digest.

    Raises:
        UserError: The log was changed or is damaged.
    """
    if log is None:
        return 0
    lines = (entry.fields for entry in log.entries())
    return sum(
        line["event"] == UPDATE and line.get("recipe") == recipe and line["outcome"] == SENT for line in lines
    )
