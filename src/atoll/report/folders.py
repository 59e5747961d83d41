"""Content of a run's folder for a report; all files except the recipe may be missing."""

from __future__ import annotations

import hashlib
import json
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from atoll.core.errors import UserError
from atoll.core.run_folder import DETECTION, NEIGHBOURS, SITES, SITES_OWN, Run, damaged
from atoll.core.tree import Tree, load
from atoll.report.artifacts import FILE as MAP_FILE
from atoll.report.client_pictures import FILE as SAMPLES_FILE


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
    samples: Tree = None
    neighbours: Tree = None
    of_sites: bool = False

    @property
    def seed(self) -> int:
        """The recipe's seed."""
        return int(self.recipe.get("seed", 0))

    @property
    def rounds(self) -> int:
        """Number of complete rounds."""
        return max((line["round"] for line in self.metrics), default=int(self.results.get("round", 0)))

    @property
    def planned(self) -> int:
        """Number of rounds in the recipe, or that early stopping left of them."""
        if self.results.get("stopped_early"):
            return self.rounds
        return int(self.recipe.get("train", {}).get("rounds", 0))

    @property
    def untrained(self) -> dict[str, Any]:
        """The evaluation before the first round; empty if there is none."""
        first = self.metrics[0] if self.metrics else {}
        return dict(first.get("evaluation", {})) if first.get("round") == 0 else {}

    @property
    def digest(self) -> str:
        """Digest of the recipe: the first twelve digits of its SHA-256."""
        return hashlib.sha256(self.recipe_text.encode()).hexdigest()[:12]


def read_folder(path: Path) -> Folder:
    """Read a run's folder; missing and damaged files are listed instead of raising an error.

    Raises:
        UserError: The folder has no recipe, so it holds no run, or the recipe cannot be read.
    """
    run = Run(path).require()
    text = run.read("recipe.toml") or ""
    try:
        recipe = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise damaged(run.recipe_path, error) from None
    if not recipe:
        raise damaged(run.recipe_path, "it is empty")
    name = path.resolve().name
    missing: list[str] = []

    def note(file: str, loss: str, why: str = "is missing") -> None:
        missing.append(f"{name}: {file} {why}, so {loss}.")

    def read(file: str, loss: str) -> dict[str, Any]:
        try:
            found = run.read_json(file)
        except UserError:
            note(file, loss, "is damaged")
            return {}
        if found is None:
            note(file, loss)
        return found or {}

    results = read("evaluation.json", "there are no final results of this run")
    partition = read("partition.json", "its clients are unknown")
    metrics: list[dict[str, Any]] = []
    state = "is missing or empty"
    try:
        metrics = run.metrics
    except (OSError, UserError):
        state = "is damaged"
    if not metrics:
        note("metrics.jsonl", "there are no curves and no untrained encoder", state)
    elif not metrics[0].get("evaluation") or metrics[0]["round"] != 0:
        note("metrics.jsonl", "the table shows none", "has no results of the untrained encoder")
    picture = None
    try:
        picture = _checked(load(path / MAP_FILE))
    except (AttributeError, KeyError, TypeError, UserError):
        # There is no map if the recipe has no points, or if the images are at the sites and must not be shown.
        expected = recipe.get("evaluation", {}).get("map_points") != 0 and results.get("split") != SITES_OWN
        if expected:
            note(MAP_FILE, "there is no map", "is damaged" if (path / MAP_FILE).is_file() else "is missing")
    found = sorted(
        path.relative_to(run.folder).as_posix() for path in run.folder.glob(f"{DETECTION}/*/*.json")
    )
    detection = [record for file in found if (record := read(file, "it is not in the table of detection"))]
    pictures: dict[str, Tree] = {}
    for file, loss in (
        (SAMPLES_FILE, "its clients' images are not shown"),
        (NEIGHBOURS, "its neighbours are not shown"),
    ):
        if (path / file).is_file():
            try:
                pictures[file] = load(path / file)
            except UserError:
                note(file, loss, "is damaged")
    folder = Folder(
        name, recipe, text, metrics, results, partition, picture, missing, detection,
        pictures.get(SAMPLES_FILE), pictures.get(NEIGHBOURS),
        (path / SITES).is_file(),
    )  # fmt: skip
    if folder.rounds < folder.planned:
        missing.insert(
            0,
            f"{name}: {folder.rounds} of {folder.planned} rounds are done; "
            "this page shows the completed ones.",
        )
    return folder


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


def compact(value: float, digits: int = 5) -> float | None:
    """Round a number to the digits that a figure needs; None if it is not finite."""
    short = float(f"{value:.{digits}g}")
    return short if json.dumps(short) not in ("NaN", "Infinity", "-Infinity") else None
