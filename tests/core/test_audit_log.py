"""The chain: what was written is read, and every change of a line is found."""

from __future__ import annotations

import hashlib
import json
import stat

import pytest

from atoll.core.audit_log import AuditLog
from atoll.core.errors import UserError


@pytest.fixture
def log(tmp_path):
    made = AuditLog(tmp_path / "deep" / "audit.jsonl")
    for round in range(1, 6):
        made.append("update", site="nörd", round=round, tensors={"weights.a": 4 * round})
    return made


def test_entries_come_back_and_the_file_is_private(log):
    entries = list(log.entries())
    assert [entry.fields["round"] for entry in entries] == [1, 2, 3, 4, 5]
    assert entries[2].fields["tensors"] == {"weights.a": 12}
    assert entries[0].fields["site"] == "nörd"
    assert stat.S_IMODE(log.path.stat().st_mode) == 0o600


def test_a_hash_is_the_sha256_of_the_one_before_and_the_line(log):
    before = "0" * 64
    for line in log.path.read_text().splitlines():
        record = json.loads(line)
        head = record.pop("hash")
        assert head == hashlib.sha256((before + json.dumps(record)).encode()).hexdigest()
        before = head


def test_every_changed_bit_is_found(log):
    data = log.path.read_bytes()
    for at in range(len(data)):
        log.path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(UserError, match=r"audit\.jsonl was changed"):
            list(log.entries())


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: lines[1:],
        lambda lines: lines[:2] + lines[3:],
        lambda lines: [lines[0], lines[2], lines[1], *lines[3:]],
        lambda lines: [lines[0], *lines],
        lambda lines: [*lines, lines[-1]],
        lambda lines: [*lines[:2], b"\n", *lines[2:]],
    ],
    ids=["first", "removed", "moved", "repeated", "replayed", "blank"],
)
def test_removed_and_moved_lines_are_found(log, change):
    log.path.write_bytes(b"".join(change(log.path.read_bytes().splitlines(keepends=True))))
    with pytest.raises(UserError, match=r"line \d does not continue"):
        list(log.entries())


def test_a_torn_line_is_named_then_replaced_and_recorded(log):
    with log.path.open("ab") as file:
        file.write(b'{"hash": "12')
    with pytest.raises(UserError, match="line 6 is incomplete"):
        list(log.entries())
    assert len(list(log.entries(incomplete=True))) == 5
    log.append("update", round=6)
    assert list(log.entries())[-1].fields["removed_incomplete_bytes"] == 12


def test_a_line_longer_than_a_block_is_continued(tmp_path):
    log = AuditLog(tmp_path / "audit.jsonl")
    for _ in range(3):
        log.append("update", tensors={f"weights.{k}": k for k in range(20_000)})
    assert len(list(log.entries())) == 3


def test_a_damaged_end_is_not_continued(log):
    log.path.write_bytes(log.path.read_bytes() + b"{}\n")
    with pytest.raises(UserError, match="its last line is no entry"):
        log.append("update")


@pytest.mark.parametrize(
    "body", ["{5}", "{}", '{"at": 5, "event": "update"}', '{"at": "now"}', '{"a": ' + "[" * 10_000 + "}"]
)
def test_a_right_hash_of_something_else_is_no_entry(log, body):
    """Anybody can compute a hash; a log comes from the other side."""
    head = hashlib.sha256(("0" * 64 + body).encode()).hexdigest()
    log.path.write_text(f'{{"hash": "{head}", {body[1:]}\n')
    with pytest.raises(UserError, match="line 1 is no entry"):
        list(log.entries())
