"""A run on disk: recipe, metrics, checkpoints, the finished encoder; and how to go on with one.

``recipe.toml``          complete, defaults filled in
``metrics.jsonl``        one object a line, with ``round`` in each; round 0 is the untrained encoder
``partition.json``       which client holds which sample
``checkpoints/``         the newest complete rounds, and what clients keep
``prerequisites/``       runs of their own that the method needed first
``encoder.safetensors``  the finished encoder; ``encoder-NAME.safetensors`` where there are several models
``evaluation.json``      what the finished encoder is worth, with the constants of the protocols
``report.html``          one page
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from atoll.core.errors import UserError
from atoll.core.files import disk_sentence, write_whole
from atoll.core.tree import Tree, load, pack

SITES_OWN = "sites' own"  # the split of an evaluation that only sites made, on images that stayed there
KEPT = 2  # complete rounds that a run keeps: should the newest be damaged by a crash of the machine
LONGEST_NAME = 200  # bytes of a recipe's name: file systems allow 255, and what is put behind it needs some
WRITTEN = (
    *("metrics.jsonl", "partition.json", "evaluation.json"),
    *("checkpoints", "prerequisites", "encoder.safetensors", "report.html"),
)


class Run:
    """A run's folder.

    Example:
        >>> from atoll import Run
        >>> run = Run("runs/digits-ssd-seed0")
        >>> run.name, run.encoder_path.name, run.exists()
        ('digits-ssd-seed0', 'encoder.safetensors', False)
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.folder.name

    @property
    def recipe_path(self) -> Path:
        """The complete recipe."""
        return self.folder / "recipe.toml"

    @property
    def encoder_path(self) -> Path:
        """The finished encoder."""
        return self.folder / "encoder.safetensors"

    @property
    def partition_path(self) -> Path:
        """Which client holds which sample."""
        return self.folder / "partition.json"

    @property
    def checkpoints(self) -> Path:
        """Complete rounds and what clients keep."""
        return self.folder / "checkpoints"

    @property
    def finished(self) -> bool:
        """Whether the run ended."""
        return self._holds("evaluation.json")

    def exists(self) -> bool:
        """Whether there is a run here."""
        return self._holds("recipe.toml")

    def require(self) -> Run:
        """This run, if there is one.

        Raises:
            UserError: there is none.
        """
        if not self.exists():
            raise UserError(
                f"{self.folder} holds no run (no recipe.toml in it); give the folder of an Atoll run"
            )
        return self

    def _holds(self, name: str) -> bool:
        try:
            return (self.folder / name).is_file()
        except OSError as error:  # the folder's name is too long, or it is closed to us
            raise UserError(
                f"cannot look into {self.folder}: {error.strerror}; choose another folder"
            ) from None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder against a second process.

        Raises:
            UserError: another process is at work in it, or the folder cannot be made.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = (self.folder / ".lock").open("w")
        except OSError as error:
            raise UserError(disk_sentence(self.folder, error)) from None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UserError(
                    f"another process is at work on {self.folder}; wait for it, or choose another --out"
                ) from None
            yield

    def write(self, name: str, text: str) -> None:
        """Write one of the run's files, whole or not at all."""
        write_whole(self.folder / name, text.encode())

    def read_json(self, name: str) -> Any:
        """One of the run's JSON files; None if it is not there.

        Raises:
            UserError: it is not JSON.
        """
        path = self.folder / name
        try:
            return json.loads(path.read_text("utf-8")) if path.is_file() else None
        except ValueError as error:
            raise UserError(f"{path} is damaged ({error}); delete it, then resume the run") from None

    def begun(self) -> bool:
        """Whether there is more here than what comes before the first round."""
        return (
            self.finished or self.completed_rounds() > 0 or any(line["round"] > 0 for line in self.metrics())
        )

    def begin_anew(self) -> None:
        """Forget which client holds which sample, and the untrained encoder: another recipe has others."""
        for path in (self.partition_path, *self._complete()):
            path.unlink(missing_ok=True)

    # Metrics.

    def log(self, line: dict[str, Any]) -> None:
        """Add a line to the metrics."""
        path = self.folder / "metrics.jsonl"
        try:
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise UserError(disk_sentence(path, error)) from None

    def metrics(self) -> list[dict[str, Any]]:
        """All complete lines."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text("utf-8", "replace").splitlines() if path.is_file() else []
        parsed = []
        for line in lines:
            try:
                parsed.append(json.loads(line))
            except json.JSONDecodeError:
                break  # a kill in mid-line; the round is run again
        return parsed

    def rewind(self, round: int) -> int:
        """Forget metrics beyond a round: they are made again. The newest round that is left; −1 if none is."""
        kept = [line for line in self.metrics() if line["round"] <= round]
        self.write("metrics.jsonl", "".join(json.dumps(line) + "\n" for line in kept))
        return max((line["round"] for line in kept), default=-1)

    # Checkpoints.

    def checkpoint(self, round: int, tree: Tree) -> None:
        """Keep a complete round, and drop the ones that it makes needless."""
        write_whole(self.checkpoints / f"round-{round:06d}.safetensors", pack(tree))
        for path in self._complete()[KEPT:]:
            path.unlink(missing_ok=True)

    def latest(self) -> Tree | None:
        """The newest complete round that can be read; None if there is none."""
        for path in self._complete():
            try:
                return load(path)
            except UserError:
                continue
        return None

    def oldest_kept(self) -> Tree | None:
        """The oldest round that the run could go back to."""
        complete = self._complete()
        return load(complete[-1]) if complete else None

    def completed_rounds(self) -> int:
        """The newest round that was completed; 0 if none was."""
        return max((int(path.stem.removeprefix("round-")) for path in self._complete()), default=0)

    def strays(self) -> list[str]:
        """What stands in the folder under a name that a run gives its own files."""
        return [name for name in WRITTEN if (self.folder / name).exists()]

    def _complete(self) -> list[Path]:
        return sorted(self.checkpoints.glob("round-*.safetensors"), reverse=True)


def check_name(name: str) -> None:
    """Check that a folder can be called after a recipe, and lies where it should.

    Raises:
        UserError: the name is blank, a path or too long.
    """
    path = name.strip() in ("", "..") or set(name) & set("/\\\0")
    if path or len(os.fsencode(name)) > LONGEST_NAME:
        raise UserError(
            f"name = {name!r} cannot name a run's folder; give it a short word, and say with --out where the "
            "folder is to lie"
        )


def default_folder(name: str, seed: int) -> Path:
    """Where a run goes when no ``--out`` is given: under ``$ATOLL_RUNS``, or ``runs`` in this folder.

    Raises:
        UserError: no folder can have the name.

    Example:
        >>> from atoll.core.run_folder import default_folder
        >>> default_folder("digits-ssd", seed=0).name
        'digits-ssd-seed0'
    """
    check_name(name)
    return Path(os.environ.get("ATOLL_RUNS", "runs")) / f"{name}-seed{seed}"
