"""Training of a site's client by several processes, which a launcher starts: torchrun, or a command like it.

Only the process that starts the launcher communicates with the coordinator. The processes read the request from a
folder of the site's state, which all of them must be able to access, and the first of them writes the answer there.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from atoll.core.locks import lock
from atoll.core.processes import why_ended
from atoll.core.tree import Tree, load, save
from atoll.engines.flower.site_errors import SiteError
from atoll.engines.flower.site_options import SiteOptions

REQUEST, ANSWER = "request.safetensors", "answer.safetensors"
JOB, LOCK = "launched-", "lock"  # prefix of a job's folder, and its file that is locked while the job runs


def launch(options: SiteOptions, folder: Path, request: Tree) -> Tree:
    """Let several processes answer a request to train.

    The processes end when this one does, because their standard input closes.

    Args:
        options: The site's configuration, with a launcher.
        folder: Folder of the run at the site.
        request: The coordinator's request.

    Returns:
        The answer.

    Raises:
        SiteError: The launcher cannot be started, or its processes ended without an answer.
    """
    _delete_abandoned(folder)
    with tempfile.TemporaryDirectory(dir=folder, prefix=JOB) as name, Path(name, LOCK).open("w") as held:
        lock(held)
        job = Path(name)
        save(job / REQUEST, {"options": asdict(replace(options, launcher="")), "request": request})
        try:
            command = [*shlex.split(options.launcher), "-m", "atoll.engines.flower.rank", name]
            with subprocess.Popen(command, stdin=subprocess.PIPE) as process:  # noqa: S603 the site owner's command
                code = process.wait()
        except (OSError, ValueError) as error:  # ValueError: a quotation mark is not closed
            raise SiteError(
                f"the launcher of {options.name!r} cannot be started; the site's own log says why, and its owner "
                "corrects launcher=… in --node-config"
            ) from error
        if not (job / ANSWER).is_file():
            raise SiteError(f"the launcher of {options.name!r} {why_ended(code)}")
        return load(job / ANSWER)


def _delete_abandoned(folder: Path) -> None:
    """Delete the folders of jobs whose process was killed, as that of a node that is stopped during a round is."""
    for job in folder.glob(f"{JOB}*"):
        with suppress(OSError), (job / LOCK).open() as file:
            lock(file, wait=False)  # fails while the job runs
            shutil.rmtree(job)
