import json
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import atoll
from atoll.core import provenance as module

ROOT = Path(__file__).parents[2]


def git(folder, *arguments):
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    call = ["git", "-C", str(folder), *who, *arguments]
    return subprocess.run(call, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def package(tmp_path):
    git(tmp_path, "init", "-q")
    folder = tmp_path / "atoll"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    git(tmp_path, "tag", "-m", "a tag is no commit", "v1")
    return folder


def test_a_checkouts_commit_and_whether_files_were_changed(package):
    commit = git(package, "rev-parse", "HEAD")[: module.DIGITS]
    assert module._checked_out(package) == commit
    (package / "__init__.py").write_text("changed = True\n")
    assert module._checked_out(package) == f"{commit}.dirty"


def test_an_environment_inside_another_projects_checkout_is_not_that_project(package):
    installed = package / ".venv" / "atoll"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    assert module._checked_out(installed) == ""


def test_no_repository_and_no_git(tmp_path, monkeypatch):
    assert module._checked_out(tmp_path) == ""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert module._checked_out(tmp_path) == ""


def test_a_commit_that_was_installed_from_an_address(monkeypatch):
    class Installed:
        def read_text(self, name):
            return json.dumps({"vcs_info": {"commit_id": "0123456789abcdef"}})

    monkeypatch.setattr(metadata, "distribution", lambda name: Installed())
    module.version.cache_clear()
    try:
        assert module.version() == f"{atoll.__version__}+g0123456"
    finally:
        module.version.cache_clear()


@pytest.mark.slow
def test_a_wheel_and_a_source_distribution_keep_their_commit(tmp_path):
    source = tmp_path / "source"
    for name in ("src/atoll/core", "src/atoll/recipes"):
        shutil.copytree(ROOT / name, source / name)
    for name in (
        "setup.py",
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "src/atoll/__init__.py",
        "src/atoll/py.typed",
    ):
        shutil.copy(ROOT / name, source / name)
    git(source, "init", "-q")
    git(source, "add", ".")
    git(source, "commit", "-qm", "first")
    commit = git(source, "rev-parse", "HEAD")[: module.DIGITS]

    def build(folder, *arguments):
        call = [sys.executable, "setup.py", "-q", *arguments]
        subprocess.run(call, cwd=folder, check=True, capture_output=True)

    build(source, "build_py", "-d", str(tmp_path / "built"))
    assert module._built(tmp_path / "built/atoll/core") == commit
    build(source, "sdist", "-d", str(tmp_path))
    (archive,) = tmp_path.glob("atoll-*.tar.gz")
    shutil.unpack_archive(archive, tmp_path / "unpacked", filter="data")
    (folder,) = (tmp_path / "unpacked").iterdir()
    build(folder, "build_py", "-d", str(tmp_path / "again"))
    assert module._built(tmp_path / "again/atoll/core") == commit
    assert module._built(source / "src/atoll/core") == ""
