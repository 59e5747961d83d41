"""Check of the paths to which commands write: they must not replace a run's files."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

from atoll.core.audit_log import FILE as AUDIT
from atoll.core.errors import UserError
from atoll.core.run_folder import EXPORTS, OTHER_FILES, RUN_FILES, Run

WRITTEN_AGAIN = ("report.html*", *EXPORTS)  # nothing else depends on them


def check_output(path: Path) -> None:
    """Refuse an output path that would replace a run's file; reports and exports may be replaced.

    Raises:
        UserError: The path is that of a run's file, or lies in one of its folders.
    """
    place = path.resolve()
    for folder in place.parents:
        name = place.relative_to(folder).parts[0].lower()  # RECIPE.TOML may be the same file
        taken, again = (
            any(fnmatchcase(name, pattern) for pattern in patterns)
            for patterns in ((*RUN_FILES, *OTHER_FILES, AUDIT), WRITTEN_AGAIN)
        )
        run = Run(folder)
        if taken and not again and run.exists() and not run.stray_files():
            raise UserError(f"{path} belongs to the run {folder}, which needs it; choose another --output")
