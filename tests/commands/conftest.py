"""A finished run, and a method that changes."""

import shutil
import sys

import pytest

from tests.commands.interrupted import OWN, SETTINGS
from tests.harness import run_tiny


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return run_tiny(tmp_path_factory.mktemp("finished") / "run", *SETTINGS).folder


@pytest.fixture
def folder(finished, tmp_path):
    """A copy of a finished run, to be damaged."""
    return shutil.copytree(finished, tmp_path / "run")


@pytest.fixture
def own_method(tmp_path, monkeypatch):
    """Write the method ``owned:METHOD``, and again as the text says."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # edits of one second look alike to Python

    def write(text=OWN):
        (tmp_path / "owned.py").write_text(text)
        monkeypatch.delitem(sys.modules, "owned", raising=False)

    write()
    return write
