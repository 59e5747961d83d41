"""Content of a run's folder for a report; all files except the recipe may be missing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from atoll.core.digests import is_sealed_text
from atoll.core.errors import UserError
from atoll.core.files import hash_bytes
from atoll.core.run_folder import DETECTION, HELD_OUT, NEIGHBOURS, SITES_OWN, Run, is_of_sites
from atoll.core.text import error_words, few, plural
from atoll.core.tree import Tree, load
from atoll.recipe.recipe import recipe_digest
from atoll.report.artifacts import FILE as MAP_FILE
from atoll.report.client_pictures import FILE as SAMPLES_FILE
from atoll.report.wording import setting_words

DETECTED, EVALUATED = f"{DETECTION}/*/*.json", "evaluation-*.json"


@dataclass(frozen=True)
class Folder:
    """Content of one run's folder.

    Attributes:
        name: Name of the folder.
        recipe: The complete recipe.
        recipe_text: The text of its file.
        metrics: Metrics by round, the untrained encoder first.
        results: The final evaluation; empty if there is none.
        partition: The size of each client; empty if there is none.
        map: Points, thumbnails, labels and classes; None if there is none.
        samples: Sample images of some clients; None if there are none.
        missing: One sentence for each file that is missing or damaged.
        neighbours: Nearest neighbours of some images; None if there are none.
        of_sites: Whether real sites trained it, and not a simulation.
        detection: Records of `atoll detect`, one for each data, start and seed.
        evaluations: Records of `atoll evaluate`, one for each protocol and images.
        held_out: Fingerprint of the images of the evaluations; empty if the run has not recorded it.
    """

    name: str
    recipe: dict[str, Any]
    recipe_text: str
    metrics: list[dict[str, Any]]
    results: dict[str, Any]
    partition: dict[str, Any]
    map: Tree
    missing: list[str] = field(default_factory=list)
    detection: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    samples: Tree = None
    neighbours: Tree = None
    of_sites: bool = False
    held_out: str = ""

    @property
    def seed(self) -> int:
        """The recipe's seed."""
        return int(self.recipe.get("seed", 0))

    @property
    def images(self) -> tuple[str, str] | None:
        """Fingerprints of the test and of the training images, the latter empty if they are at sites.

        None if each seed has images of its own, as with a validation split, or if they were not recorded.
        """
        if self.results.get("split") != "test" or not self.held_out:
            return None
        return self.held_out, "" if self.of_sites else str(self.partition.get("fingerprint", ""))

    @property
    def setting(self) -> str:
        """Words for the images, the clients and their partition; real sites do not have the recipe's."""
        if self.of_sites:
            return f"{plural(len(self.partition['clients']), 'site')}, their own images"
        return setting_words(self.recipe)

    @property
    def rounds(self) -> int:
        """Number of complete rounds."""
        return max(int(line.get("round", 0)) for line in [self.results, *self.metrics])

    @property
    def planned(self) -> int:
        """Number of rounds in the recipe."""
        return int(self.recipe.get("train", {}).get("rounds", 0))

    @property
    def stopped_early(self) -> bool:
        """Whether early stopping ended the run."""
        return bool(self.results.get("stopped_early"))

    @property
    def untrained(self) -> dict[str, Any]:
        """The evaluation before the first round; empty if there is none."""
        first = self.metrics[0] if self.metrics else {}
        return dict(first.get("evaluation", {})) if first.get("round") == 0 else {}

    @property
    def digest(self) -> str:
        """Digest of the recipe: the first twelve digits of its SHA-256."""
        return recipe_digest(self.recipe_text)[:12]


def read_folder(path: Path) -> Folder:
    """Read a run's folder; missing and damaged files are listed instead of raising an error.

    Raises:
        UserError: The folder has no recipe, so it holds no run, or the recipe cannot be read.
    """
    run = Run(path)
    recipe = run.recipe_table()
    files = _Files(run, path.resolve().name)
    results = files.table("evaluation.json", "there are no final results of this run")
    # There is no map if the recipe has no points, or if the images are at the sites and must not be shown.
    mapped = recipe.get("evaluation", {}).get("map_points") != 0 and results.get("split") != SITES_OWN
    found = {
        pattern: [
            path.relative_to(run.folder).as_posix()
            for path in sorted(run.folder.glob(pattern), key=lambda path: path.with_suffix(""))
        ]
        for pattern in (DETECTED, EVALUATED)
    }
    partition = files.table("partition.json", "its clients are unknown")
    folder = Folder(
        name=files.name,
        recipe=recipe,
        recipe_text=run.read("recipe.toml") or "",
        metrics=files.metrics(int(results.get("round", 0))),
        results=results,
        partition=partition,
        map=files.tensors(MAP_FILE, "there is no map", _checked, needed=mapped),
        missing=files.missing,
        detection=list(files.detection(found[DETECTED])),
        evaluations=list(files.evaluations(found[EVALUATED])),
        samples=files.tensors(SAMPLES_FILE, "its clients' images are not shown"),
        neighbours=files.tensors(NEIGHBOURS, "its neighbours are not shown"),
        of_sites=is_of_sites(partition),
        held_out=str(
            files.table(HELD_OUT, "its test images are unknown", needed=False).get("fingerprint", "")
        ),
    )
    if folder.rounds < folder.planned and not folder.stopped_early:
        folder.missing.insert(
            0,
            f"{files.name}: {folder.rounds} of {folder.planned} rounds are done; "
            "this page shows the completed ones.",
        )
    return folder


@contextmanager
def edited_files_named(folders: Sequence[Path]) -> Iterator[None]:
    """In the block, blame an error on the files without a digest, if there are any: nothing has verified them.

    Raises:
        UserError: A file holds something that Atoll does not write.
    """
    try:
        yield
    except UserError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        unverified = [str(path) for folder in folders for path in _without_digest(folder)]
        if not unverified:
            raise
        raise UserError(
            f"a file of the run holds something that Atoll does not write ({error_words(error)}); those without a "
            f"digest may have been edited: {few(unverified, 5)}; restore them from a copy"
        ) from error


def _without_digest(folder: Path) -> list[Path]:
    """Files of text that the report reads and that have no digest."""
    names = ("recipe.toml", "metrics.jsonl", "*.json", f"{DETECTION}/*/*.json")
    return [path for name in names for path in sorted(folder.glob(name)) if not _has_digest(path)]


def _has_digest(path: Path) -> bool:
    data = path.read_bytes()
    pieces = data.splitlines() if path.suffix == ".jsonl" else [data]  # each line of the metrics has its own
    return all(map(is_sealed_text, pieces))


class _Files:
    """Files of a run, of which those that are missing or damaged are noted.

    Attributes:
        missing: One sentence for each, with what the page lacks by it.
    """

    def __init__(self, run: Run, name: str) -> None:
        self.name = name
        self.missing: list[str] = []
        self._run = run

    def table(self, file: str, loss: str, needed: bool = True) -> dict[str, Any]:
        """A table in JSON; empty if it cannot be read. Its absence is noted if it is needed; damage always is."""
        try:
            found = self._run.read_json(file)
        except UserError:
            self._note(file, loss, "is damaged")
            return {}
        if found is None and needed:
            self._note(file, loss)
        return found or {}

    def detection(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Records of detectors that start from the run's encoder, as it is now, or from new weights."""
        path, loss = self._run.encoder_path, "it is not in the table of detection"
        weights = hash_bytes(path.read_bytes()) if names and path.is_file() else None
        for name in names:
            record = self.table(name, loss)
            if weights and record.get("encoder", {}).get("weights", weights) != weights:
                self._note(name, loss, "is of an earlier encoder")
            elif record:
                yield record

    def evaluations(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Records of further evaluations; the reproduction of a table has files of its own."""
        for name in names:
            record = self.table(name, "it is not in the table of further evaluations")
            if "protocol" in record:
                yield record

    def metrics(self, evaluated: int) -> list[dict[str, Any]]:
        """Metrics by round; a round that was evaluated must be among them."""
        found: list[dict[str, Any]] = []
        state = "is missing or empty"
        try:
            found = self._run.metrics
        except (OSError, UserError):
            state = "is damaged"
        if not found:
            self._note("metrics.jsonl", "there are no curves and no untrained encoder", state)
        elif not found[0].get("evaluation") or found[0]["round"] != 0:
            self._note("metrics.jsonl", "the table shows none", "has no results of the untrained encoder")
        if found and found[-1]["round"] < evaluated:
            ends = f"ends at round {found[-1]['round']} of {evaluated}"
            self._note("metrics.jsonl", "the curves lack the rounds between", ends)
        return found

    def tensors(
        self,
        file: str,
        loss: str,
        check: Callable[[Tree], Tree] = lambda tree: tree,
        needed: bool = False,
    ) -> Tree:
        """Tensors in a file; None if they cannot be read.

        Args:
            file: The file.
            loss: What the page lacks without it.
            check: Raises an error if the tensors do not belong together.
            needed: Whether its absence is noted; damage always is.
        """
        path = self._run.folder / file
        if not path.is_file():
            if needed:
                self._note(file, loss)
            return None
        try:
            return check(load(path))
        except (AttributeError, KeyError, TypeError, UserError):
            self._note(file, loss, "is damaged")
            return None

    def _note(self, file: str, loss: str, why: str = "is missing") -> None:
        self.missing.append(f"{self.name}: {file} {why}, so {loss}.")


def _checked(picture: Tree) -> Tree:
    points, thumbnails = picture["points"], picture["thumbnails"]
    labels = picture["labels"]
    consistent = (
        points.shape == (len(thumbnails), 2)
        and thumbnails.ndim == 4
        and thumbnails.dtype == torch.uint8
        and (labels is None or labels.shape == (len(points),))
    )
    if not consistent:
        raise UserError("the map's points, thumbnails and labels do not match")
    return picture


def compact(value: float) -> float | None:
    """Round a number to the five digits that a figure needs; None if it is not finite."""
    short = float(f"{value:.5g}")
    return short if math.isfinite(short) else None
