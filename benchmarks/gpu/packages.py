"""Name all packages that Atoll needs and this Python lacks: a missing one would otherwise show after the other."""

import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def missing(project: Path) -> list[str]:
    """Names of a project's dependencies that are not installed."""
    wanted = tomllib.loads(project.read_text("utf-8"))["project"]["dependencies"]
    names = [re.split(r"[<>=!~ \[;]", one)[0] for one in wanted]
    return [name for name in names if not _installed(name)]


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


if __name__ == "__main__" and (names := missing(Path(sys.argv[1]))):
    sys.stderr.write(f"{sys.executable} lacks {', '.join(names)}; $WHEELS may hold pure wheels\n")
    sys.exit(2)
