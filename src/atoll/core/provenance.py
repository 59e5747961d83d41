"""Provenance of results: the version of the code, and its commit if known."""

from __future__ import annotations

import json
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path

from atoll.core.version import VERSION

DIGITS = 7  # of a commit's name


@cache
def version() -> str:
    """Version with its commit: ``"0.2.0+g1a2b3c4"``, followed by ``".dirty"`` if files have changed since.

    The commit is known if this package was installed from a repository's URL, is imported from a checkout, or was
    built in one.
    """
    commit = _installed() or _checked_out(Path(__file__).parent) or _built(Path(__file__).parent)
    return f"{VERSION}+g{commit}" if commit else VERSION


def _installed() -> str:
    """Commit that was installed (PEP 610), or an empty string."""
    try:
        origin = metadata.distribution("atoll").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return ""
    commit: str = json.loads(origin or "{}").get("vcs_info", {}).get("commit_id", "")
    return commit[:DIGITS]


def _built(package: Path) -> str:
    """Commit that the build wrote into the package (see ``setup.py``), or an empty string."""
    try:
        return (package / "commit.txt").read_text().strip()
    except OSError:
        return ""


def _checked_out(package: Path) -> str:
    """Commit of the repository that tracks this package's files, or an empty string."""

    def git(*arguments: str) -> str:
        call = ["git", "-C", str(package), *arguments]
        return subprocess.run(call, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S603

    try:
        # A repository that merely contains the environment does not track the file.
        git("ls-files", "--error-unmatch", "__init__.py")
        described = git("describe", "--always", "--dirty=.dirty", "--exclude=*", f"--abbrev={DIGITS}")
    except (OSError, subprocess.CalledProcessError):
        return ""
    return described
