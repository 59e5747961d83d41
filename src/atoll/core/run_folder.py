"""Run folder: recipe, metrics, checkpoints, the finished encoder, and the state from which a run resumes.

``recipe.toml``          the complete recipe, with defaults filled in
``metrics.jsonl``        one object per line, each with ``round``; round 0 is the untrained encoder
``partition.json``       the samples of each client
``environment.json``     the kind of CPU, the libraries and the device that computed the rounds
``weights.json``         SHA-256 of the file of pretrained weights from which the run started
``start.json``           SHA-256 of the encoder of a warm start
``held_out.json``        fingerprint of the images of the evaluations
``clients.safetensors``  sample images of some clients, for the report
``neighbours.safetensors``  nearest neighbours of some images, by ``atoll neighbours``
``checkpoints/``         the newest complete rounds, and the client states (many of them packed)
``prerequisites/``       runs that the method needs before its first round
``encoder.safetensors``  the finished encoder; ``encoder-NAME.safetensors`` if there are several models
``encoder-export…``      what ``atoll export`` wrote, if no other output was named
``evaluation.json``      results of the finished encoder, with the constants of the protocols
``detection/``           average precision of detectors that start from the encoder, by data
``map.safetensors``      some test images and their places on the report's map
``logs.json``            the ids of the run in other tools; ``tensorboard``, ``wandb`` hold their files
``audit.jsonl``          what the coordinator of a federation asked, received and decided (`atoll.core.audit_log`)
``report.html``          the report, one page

All files except the report carry a digest (`atoll.core.digests`), which is verified at every read.
"""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from atoll.core.checkpoints import checkpoint_files, load_checkpoint, save_checkpoint
from atoll.core.digests import JSON, TOML, DamagedError, open_text, seal_text
from atoll.core.errors import UserError
from atoll.core.files import append, disk_sentence, expand_home, is_file, read_bytes, to_path, write_whole
from atoll.core.locks import lock
from atoll.core.metrics_lines import Metrics, Results, format_line, parse_lines
from atoll.core.remedies import RESTART, damaged
from atoll.core.tree import Tree

DETECTION = "detection"  # folder of the results of `atoll detect`
ENVIRONMENT = "environment.json"
LOGS = "logs.json"  # the ids of the run in other tools
WEIGHTS, START = "weights.json", "start.json"  # the digests of weights from which the run started
HELD_OUT = "held_out.json"  # the fingerprint of the images of the evaluations
NEIGHBOURS = "neighbours.safetensors"
SITES = "sites.json"  # in the folder of a run on Flower
_OF_SITES = "sites-"  # prefix of the partition's fingerprint if the images are at real sites
SITES_OWN = "sites' own"  # the split of an evaluation that only sites computed, on their local images
RETAINED_ROUNDS = 2  # complete rounds that a run retains, in case a crash of the machine damages the newest
EXPORTS = ("encoder-export*", "encoder-*-export*")  # by `atoll export`, in any format
RESULTS = (  # of the finished encoder: out of date once another round is complete
    *("evaluation.json", "evaluation-*.json", "encoder.safetensors", "encoder-*.safetensors"),
    *("map.safetensors", NEIGHBOURS, *EXPORTS),
)
RUN_FILES = (
    *("metrics.jsonl", "partition.json", ENVIRONMENT, WEIGHTS, START, HELD_OUT, LOGS),
    *("checkpoints", "models", "prerequisites", "clients.safetensors", *RESULTS, "report.html"),
)
OTHER_FILES = ("recipe.toml", SITES, "tensorboard", "wandb", DETECTION)
FORMS = {".json": JSON, ".toml": TOML}


class Run:
    """Folder of a run.

    Args:
        folder: Path of the folder; it need not exist.

    Example:
        >>> from atoll import Run
        >>> run = Run("runs/digits-ssd-seed0")
        >>> run.name, run.encoder_path.name, run.exists()
        ('digits-ssd-seed0', 'encoder.safetensors', False)
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = expand_home(to_path(folder, "a run's folder"))

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.folder.name

    @property
    def recipe_path(self) -> Path:
        """Path of the complete recipe."""
        return self.folder / "recipe.toml"

    @property
    def encoder_path(self) -> Path:
        """Path of the finished encoder."""
        return self.folder / "encoder.safetensors"

    @property
    def partition_path(self) -> Path:
        """Path of the partition, which lists the samples of each client."""
        return self.folder / "partition.json"

    @property
    def checkpoints(self) -> Path:
        """Folder of the complete rounds and the client states."""
        return self.folder / "checkpoints"

    @property
    def finished(self) -> bool:
        """Whether the run has finished."""
        return self._holds("evaluation.json")

    def exists(self) -> bool:
        """Whether the folder contains a run."""
        return self._holds("recipe.toml")

    def require(self) -> Run:
        """Return this run if it exists.

        Raises:
            UserError: The folder contains no run.
        """
        if not self.exists():
            inside = sorted(str(recipe.parent) for recipe in self.folder.glob("*/recipe.toml"))[:3]
            hint = f", such as {', '.join(inside)}" if inside else ""
            raise UserError(f"{self.folder} holds no run (no recipe.toml in it); give a run's folder{hint}")
        return self

    def _holds(self, name: str) -> bool:
        try:
            return is_file(self.folder / name)
        except OSError as error:  # the folder's name is too long, or access is denied
            raise UserError(f"cannot read {self.folder}: {error.strerror}; choose another folder") from None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder, so that no second process can use it.

        Raises:
            UserError: Another process is using the folder, or the folder cannot be created.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = (self.folder / ".lock").open("w")
        except OSError as error:
            raise UserError(disk_sentence(self.folder, error)) from None
        with file:
            try:
                lock(file, wait=False)
            except OSError:
                raise UserError(
                    f"another process is using {self.folder}; wait for it, or choose another --out"
                ) from None
            yield

    def write(self, name: str, text: str) -> None:
        """Write one of the run's JSON or TOML files atomically, with a digest."""
        path = self.folder / name
        write_whole(path, seal_text(text.encode(), FORMS[path.suffix]))

    def read(self, name: str) -> str | None:
        """Read one of the run's JSON or TOML files, without its digest; None if the file does not exist.

        Raises:
            UserError: The file is damaged or cannot be read.
        """
        path = self.folder / name
        try:
            return open_text(path.read_bytes(), FORMS[path.suffix])[0].decode() if is_file(path) else None
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from None
        except ValueError as error:
            raise damaged(path, error) from None

    def read_json(self, name: str) -> dict[str, Any] | None:
        """Read one of the run's JSON files; None if the file does not exist.

        Raises:
            UserError: The file is damaged, or holds no JSON object.
        """
        record = self._parse(name, json.loads)
        if record is not None and not isinstance(record, dict):
            raise damaged(self.folder / name, "it holds no JSON object")
        return record

    def recipe_table(self) -> dict[str, Any]:
        """Read the complete recipe as a table.

        Raises:
            UserError: There is no run in the folder, or its recipe is damaged.
        """
        if not (table := self.require()._parse("recipe.toml", tomllib.loads)):
            raise damaged(self.recipe_path, "it is empty")
        return dict(table)

    def _parse(self, name: str, parse: Callable[[str], Any]) -> Any:
        text = self.read(name)
        try:
            return None if text is None else parse(text)
        except (ValueError, RecursionError) as error:
            raise damaged(self.folder / name, error) from None

    @property
    def results(self) -> Results:
        """The results of the finished encoder, read from their file; empty if there are none.

        Raises:
            UserError: The file is damaged.
        """
        record = self.read_json("evaluation.json")
        if record is not None and type(record.get("round")) is not int:
            raise damaged(self.folder / "evaluation.json", "it names no round")
        return Results(record or {})

    def environments(self) -> list[dict[str, Any]]:
        """Read the environments in which the rounds were computed, newest last; empty if unknown.

        The results of a finished run list them, too.

        Raises:
            UserError: The file is damaged.
        """
        record = self.read_json(ENVIRONMENT)
        found = (self.results if record is None else record).get("environments", [])
        if not isinstance(found, list) or not all(
            isinstance(one, dict) and isinstance(one.get("environment"), dict) for one in found
        ):
            raise damaged(self.folder / ENVIRONMENT, "it lists no environments")
        return found

    def lost_environments(self) -> bool:
        """Whether the record of the environments is lost; the first versions wrote neither it nor held_out.json."""
        return (self.folder / HELD_OUT).is_file() and not self.environments()

    def started(self) -> bool:
        """Whether the run has metrics, checkpoints or results beyond round 0."""
        return self.finished or self.completed_rounds() > 0 or any(line["round"] > 0 for line in self.metrics)

    def reset(self) -> None:
        """Delete the partition, the checkpoints and so on, which a changed recipe may change."""
        names = ("partition.json", ENVIRONMENT, WEIGHTS, START, HELD_OUT)
        for path in (*(self.folder / name for name in names), *checkpoint_files(self.checkpoints).values()):
            path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Delete all files of the run, because the user restarts it.

        Raises:
            UserError: A file cannot be deleted.
        """
        self._delete((*RUN_FILES, *OTHER_FILES))

    def _delete(self, patterns: Sequence[str]) -> None:
        for path in dict.fromkeys(path for pattern in patterns for path in self.folder.glob(pattern)):
            try:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            except OSError as error:
                raise UserError(f"cannot delete {path}: {error.strerror}") from None

    # Metrics.

    def log(self, line: dict[str, Any]) -> None:
        """Append a line to the metrics."""
        path = self.folder / "metrics.jsonl"
        try:
            append(path, format_line(line))
        except OSError as error:
            raise UserError(disk_sentence(path, error)) from None

    @property
    def metrics(self) -> Metrics:
        """All complete lines of the metrics, one for each round, read from their file.

        Raises:
            UserError: A line is damaged, lines are missing, or the file cannot be read.
        """
        path = self.folder / "metrics.jsonl"
        try:
            return Metrics(parse_lines(read_bytes(path)) if is_file(path) else [])
        except DamagedError as error:
            raise damaged(path, error) from None

    def rewind(self, round: int) -> int:
        """Delete the metrics of later rounds, which will run again.

        Returns:
            The newest remaining round; −1 if there is none.
        """
        remaining = [line for line in self.metrics if line["round"] <= round]
        write_whole(self.folder / "metrics.jsonl", b"".join(map(format_line, remaining)))
        return max((line["round"] for line in remaining), default=-1)

    # Checkpoints.

    def checkpoint(self, round: int, tree: Tree) -> None:
        """Save the state after a complete round, and delete the checkpoints that are no longer needed.

        If a finished run is extended, its results are then out of date and are deleted.
        """
        save_checkpoint(self.checkpoints, round, tree)
        if self.finished:
            self._delete(RESULTS)
        for path in list(checkpoint_files(self.checkpoints).values())[RETAINED_ROUNDS:]:
            path.unlink(missing_ok=True)

    def latest(self) -> Tree | None:
        """Load the newest complete round that can be read.

        Returns:
            The state after the round; None if no round has been completed.

        Raises:
            UserError: Rounds have been completed, but no checkpoint can be read.
        """
        unreadable: list[str] = []
        for round, path in checkpoint_files(self.checkpoints).items():
            try:
                return load_checkpoint(path, round)
            except UserError as error:
                unreadable.append(str(error))
        if unreadable or self.started():
            why = f" ({unreadable[0]})" if unreadable else ""
            raise UserError(
                f"{self.checkpoints} holds no checkpoint that can be read{why}, and rounds have been completed; "
                f"restore one from a copy, or {RESTART}"
            )
        return None

    def completed_rounds(self) -> int:
        """Number of the newest complete round; 0 if there is none."""
        return max(checkpoint_files(self.checkpoints), default=0)

    def stray_files(self) -> list[str]:
        """Names of the files and folders that no run wrote, and that a run would overwrite."""
        if self.exists():  # unless the folder only contains a recipe that somebody wrote by hand
            sealed = read_bytes(self.recipe_path).startswith(TOML.before)
            return [] if sealed or self.started() else ["recipe.toml"]
        return [path.name for pattern in RUN_FILES for path in self.folder.glob(pattern)]


def fingerprint_of_sites(federation: str) -> str:
    """Fingerprint of a partition whose images are at real sites, from the federation's id."""
    return f"{_OF_SITES}{federation}"


def is_of_sites(partition: Mapping[str, Any]) -> bool:
    """Whether the images of a partition, as its file describes it, are at real sites."""
    return str(partition.get("fingerprint", "")).startswith(_OF_SITES)
