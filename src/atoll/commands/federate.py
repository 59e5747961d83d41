"""``atoll federate audit``: the audit logs of a federation of real sites."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from atoll.core.audit_log import FILE, AuditLog, is_hash
from atoll.core.errors import UserError


def verify_log(path: Path, hashes: Sequence[str] = ()) -> str:
    """Verify an audit log.

    Args:
        path: The log, or the folder of a coordinator's run.
        hashes: Hashes that somebody else has kept of the log's lines.

    Returns:
        What was verified, in one line.

    Raises:
        UserError: There is no log, a line was changed, or a hash is not in the log or no hash.
    """
    for one in hashes:
        if not is_hash(one):
            raise UserError(
                f"{one!r} is not the hash of a line, which has 64 hexadecimal digits; copy all of it"
            )
    path = path / FILE if path.is_dir() else path
    count, ends, missing = 0, ["", ""], set(hashes)
    head = ""
    for entry in AuditLog(path).entries():
        count, head = count + 1, entry.hash
        ends = [ends[0] or str(entry.fields["at"]), str(entry.fields["at"])]
        missing.discard(entry.hash)
    if not count:
        raise UserError(
            f"{path} is no audit log, or an empty one; name an audit.jsonl, or a run that has one"
        )
    if missing:
        raise UserError(
            f"{path} does not contain the line with the hash {min(missing)}, so lines were cut off or written "
            "anew; compare it with a copy"
        )
    return f"{path}: {count} lines from {ends[0]} to {ends[1]}, each continues the ones before it; last hash {head}"
