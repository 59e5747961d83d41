"""Which code made a number: the version, and the commit where one is known."""

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
    """The version with its commit: ``"0.1.0+g1a2b3c4"``, and ``".dirty"`` behind it where files were changed since.

    The commit is known if this package was installed from a repository's address or is imported from a checkout.
    """
    commit = _installed() or _checked_out(Path(__file__).parent)
    return f"{VERSION}+g{commit}" if commit else VERSION


def _installed() -> str:
    """The commit that was installed (PEP 610), or nothing."""
    try:
        origin = metadata.distribution("atoll").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return ""
    commit: str = json.loads(origin or "{}").get("vcs_info", {}).get("commit_id", "")
    return commit[:DIGITS]


def _checked_out(package: Path) -> str:
    """The commit of the repository that holds this package's files among its own, or nothing."""

    def git(*arguments: str) -> str:
        call = ["git", "-C", str(package), *arguments]
        return subprocess.run(call, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S603

    try:
        git(
            "ls-files", "--error-unmatch", "__init__.py"
        )  # an environment in another project's folder is not its
        described = git("describe", "--always", "--dirty=.dirty", "--exclude=*", f"--abbrev={DIGITS}")
    except (OSError, subprocess.CalledProcessError):
        return ""
    return described
