"""The build: a wheel and a source distribution keep the commit that they were made from (see pyproject.toml)."""

from __future__ import annotations

import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

FILE = Path("atoll/core/commit.txt")  # `atoll.core.provenance` reads it


def commit() -> str:
    """Commit of this checkout, or of the source distribution that this is; empty if unknown."""
    call = ["git", "describe", "--always", "--dirty=.dirty", "--exclude=*", "--abbrev=7"]
    try:
        # A repository that merely contains this folder does not track the file.
        tracked = ["git", "ls-files", "--error-unmatch", "pyproject.toml"]
        subprocess.run(tracked, capture_output=True, check=True)  # noqa: S603
        return subprocess.run(call, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S603
    except (OSError, subprocess.CalledProcessError):
        kept = Path("src") / FILE
        return kept.read_text().strip() if kept.is_file() else ""


def keep(folder: Path) -> None:
    """Write the commit into a package that is being built."""
    if found := commit():
        (folder / FILE).write_text(found + "\n")


class Build(build_py):
    """Builds the package with its commit."""

    def run(self) -> None:
        """Copy the modules, then write the commit; an editable install reads it from the checkout."""
        super().run()
        if not self.editable_mode:
            keep(Path(self.build_lib))


class Source(sdist):
    """Makes a source distribution with its commit."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        """Copy the files, then write the commit."""
        super().make_release_tree(base_dir, files)
        keep(Path(base_dir) / "src")


setup(cmdclass={"build_py": Build, "sdist": Source})
