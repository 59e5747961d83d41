"""Temporary files of killed writers."""

import os
import subprocess
import sys
from functools import partial

import pytest

from atoll.core import files
from atoll.core.errors import UserError
from atoll.core.files import (
    cache_folder,
    clear_parts,
    content_digest,
    is_file,
    read_bytes,
    whole_file,
    write_whole,
)
from atoll.core.run_folder import Run
from atoll.data.sources import locate


def old(path):
    os.utime(path, (1, 1))


def test_only_the_temporary_files_of_killed_writers_are_cleared(tmp_path):
    program = (
        "import os, sys; from pathlib import Path; from atoll.core.files import whole_file\n"
        f"with whole_file(Path({str(tmp_path)!r}) / 'killed', shared=True): os._exit(1)"
    )
    subprocess.run([sys.executable, "-c", program], check=False)
    (left,) = tmp_path.iterdir()
    clear_parts(tmp_path)
    assert left.exists(), "a writer may have created it a moment ago"
    old(left)
    with whole_file(tmp_path / "written", shared=True) as file:
        old(file.name)
        clear_parts(tmp_path)
        file.write(b"whole")
    assert {path.name for path in tmp_path.iterdir()} == {"written"}


def test_a_folder_is_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path, tmp_path.relative_to(tmp_path)):
        with pytest.raises(UserError, match="is a folder; name a file"):
            write_whole(path, b"")


def test_a_file_that_may_or_may_not_be_is_an_error(tmp_path):
    """`Path.is_file` says False for it from Python 3.14 on, as for one that is not there."""
    (file := tmp_path / "file").touch()
    assert [is_file(path) for path in (file, tmp_path, tmp_path / "none", file / "below")] == [
        True, False, False, False
    ]  # fmt: skip
    with pytest.raises(OSError, match="File name too long"):
        is_file(tmp_path / ("x" * 300))


def test_a_pipe_among_files_is_named_and_never_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "link.png").symlink_to(tmp_path / "pipe.png")
    for name in ("pipe.png", "link.png"):
        with pytest.raises(
            UserError, match=rf"{name} is a pipe, a socket or a device, and not a regular file"
        ):
            content_digest([(name, tmp_path / name)])


@pytest.mark.parametrize("read", [read_bytes, lambda path: content_digest([("a", path)])])
def test_a_link_without_a_target_is_said_to_be_one(tmp_path, read):
    (tmp_path / "link.png").symlink_to("gone.png")
    with pytest.raises(UserError, match=r"link\.png: it is a link to gone\.png, which does not exist"):
        read(tmp_path / "link.png")
    with pytest.raises(UserError, match=r"none\.png: No such file or directory$"):
        read(tmp_path / "none.png")


def test_a_damaged_note_of_a_digest_is_computed_again(tmp_path, monkeypatch):
    monkeypatch.setenv("ATOLL_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "source"
    source.write_bytes(b"pixels")
    digest = content_digest([("source", source)])
    (memo,) = (tmp_path / "cache/digests").iterdir()
    memo.write_bytes(b"f" + memo.read_bytes()[1:])
    assert content_digest([("source", source)]) == digest
    memo.write_bytes(b"f" * 32)  # as 0.1 wrote it
    assert content_digest([("source", source)]) == digest


def test_a_link_that_leads_to_another_file_of_the_same_size_and_time_has_its_digest(tmp_path, monkeypatch):
    monkeypatch.setenv("ATOLL_CACHE", str(tmp_path / "cache"))
    link, found = tmp_path / "link", []
    for name in ("one", "two"):
        (tmp_path / name).write_text(name)
        os.utime(tmp_path / name, (0, 0))
        link.unlink(missing_ok=True)
        link.symlink_to(name)
        found.append(content_digest([("image", link)]))
        assert found[-1] == content_digest([("image", tmp_path / name)])
    assert found[0] != found[1]


def test_a_user_without_a_home_is_told_to_name_the_cache(monkeypatch):
    pwd = pytest.importorskip("pwd")

    def unknown(user):
        raise KeyError(user)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("ATOLL_CACHE", raising=False)
    with pytest.raises(UserError, match="set ATOLL_CACHE"):
        cache_folder()
    monkeypatch.setenv("ATOLL_CACHE", "/there")
    assert str(cache_folder()) == "/there"


@pytest.mark.parametrize("read", [Run, partial(locate, option="data.path")])
def test_a_path_in_a_home_folder_that_does_not_exist_gets_a_sentence(read):
    with pytest.raises(
        UserError, match=r"there is no home folder for ~no-such-user/it; write the whole path"
    ):
        read("~no-such-user/it")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
def test_a_pipe_is_written_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, [b"one ", b"two"])
        assert os.read(reader, 100) == b"one two"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_what_is_written_to_stdout_is_added_to_the_file_there(tmp_path, monkeypatch):
    """Not with the real one, which a failing test of root's would replace."""
    monkeypatch.setattr(files, "_DEVICES", tmp_path / "dev")
    log, stdout = tmp_path / "log", tmp_path / "dev" / "stdout"
    log.write_text("before ")
    stdout.parent.mkdir()
    stdout.symlink_to(log)
    write_whole(stdout, b"after")
    assert log.read_text() == "before after"
    assert stdout.is_symlink()
