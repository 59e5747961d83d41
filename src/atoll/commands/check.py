"""``atoll check``: verifies all files of a run."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from atoll.commands.run_files import partition_of
from atoll.core import tree
from atoll.core.audit_log import FILE as AUDIT
from atoll.core.audit_log import AuditLog
from atoll.core.checkpoints import checkpoint_files, load_checkpoint, round_of
from atoll.core.digests import is_sealed_text
from atoll.core.errors import UserError
from atoll.core.kept_models import FOLDER as MODELS
from atoll.core.remedies import damaged, missing, remedy
from atoll.core.run_folder import DETECTION, ENVIRONMENT, NEIGHBOURS, SITES, Run, is_of_sites
from atoll.core.tree import load, sealed
from atoll.engines.client_states import label
from atoll.engines.state_packs import read_place, read_table
from atoll.models import MissingEncoderError
from atoll.models.files import has_digest, load_encoder
from atoll.recipe.prerequisites import FOLDER
from atoll.recipe.recipe import recipe_of
from atoll.report.artifacts import FILE as MAP_FILE
from atoll.report.client_pictures import FILE as SAMPLES_FILE

SKIPPED = (".lock", "report.html", "table.md")  # never read again


@dataclass
class Checked:
    """Result of `check_run`.

    Attributes:
        files: Number of files that were read.
        unverified: Files without a digest, which Atoll 0.1 wrote.
        damaged: A sentence for each damaged or missing file.
    """

    files: int = 0
    unverified: list[Path] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)


def check_run(run: Run) -> Checked:
    """Read all files of a run and of its prerequisite runs, and verify their digests.

    Raises:
        UserError: The folder holds no run.
    """
    found = Checked()
    _check(run.require(), found)
    # Every file that is read with a damaged one, such as the recipe, leads to the same sentence.
    found.damaged = list(dict.fromkeys(found.damaged))
    return found


def _check(run: Run, found: Checked) -> None:
    for path, read in _readers(run):
        found.files += 1
        try:
            read()
            if not _has_digest(path):
                found.unverified.append(path)
        except UserError as error:
            found.damaged.append(str(error))
    try:
        if run.started() and not checkpoint_files(run.checkpoints):
            found.damaged.append(f"{run.checkpoints} holds no checkpoint; restore one from a copy")
        found.damaged += [missing(path) for path in _needed(run) if not path.is_file()]
        found.damaged += _lost_lines(run)
    except UserError as error:
        found.damaged.append(str(error))
    for other in sorted((run.folder / FOLDER).glob("*/")):
        _check(Run(other), found)


def _needed(run: Run) -> Iterator[Path]:
    """Files that the run must have by now."""
    if run.completed_rounds():
        yield run.partition_path
        yield run.folder / "metrics.jsonl"
        if run.lost_environments():
            yield run.folder / ENVIRONMENT
        if run.completed_rounds() >= recipe_of(run).train.rounds:
            yield run.folder / "evaluation.json"
    if run.results.get("model") is not None:
        yield run.encoder_path
    if run.completed_rounds() and is_of_sites(run.read_json(run.partition_path.name) or {}):
        yield run.folder / SITES
        if _has_digest(run.recipe_path):  # Atoll 0.1 kept no audit log
            yield run.folder / AUDIT


def _lost_lines(run: Run) -> list[str]:
    """A sentence, if the metrics end before the newest complete round."""
    path, done = run.folder / "metrics.jsonl", run.completed_rounds()
    last = max((line["round"] for line in run.metrics), default=-1)
    if not 0 <= last < done:  # without any line the file is missing, or incomplete
        return []
    remedy = "restore it from a copy, or go on without its last lines"
    if last == done - 1 and not run.finished:  # a kill after the checkpoint, which holds the line
        remedy = "resume the run, which writes the last line again"
    return [f"{path} ends at round {last} of {done}; {remedy}"]


def _readers(run: Run) -> Iterator[tuple[Path, Callable[[], object]]]:
    """Yield each file that the run reads again, with the function that reads it."""
    for path in sorted(run.folder.iterdir()):
        if path.name in SKIPPED or not path.is_file():
            continue
        if path.name == "recipe.toml":
            yield path, partial(recipe_of, run)
        elif path.name == "partition.json":
            yield path, partial(partition_of, run)
        elif path.name == "evaluation.json":
            yield path, partial(getattr, run, "results")
        elif path.name == ENVIRONMENT:
            yield path, run.environments
        elif path.name == "metrics.jsonl":
            yield path, partial(_metrics, run, path)
        elif path.name == AUDIT:
            yield path, partial(_audit, path)
        elif path.suffix == ".json":
            yield path, partial(run.read_json, path.name)
        elif path.name in (MAP_FILE, SAMPLES_FILE, NEIGHBOURS):
            yield path, partial(_tree, path)
        elif re.fullmatch(r"encoder(-.*)?\.safetensors", path.name):
            yield path, partial(_encoder, path)
    for path in sorted(run.checkpoints.glob("round-*.safetensors")):
        yield path, partial(_checkpoint, run, path)
    for path in sorted(run.checkpoints.glob("clients/*/*.safetensors")):
        yield path, partial(_client_state, path)
    for path in sorted(run.checkpoints.glob("clients/pack-*.states")):
        yield path, partial(_client_states, path)
    for path in sorted((run.folder / DETECTION).glob("*/*.json")):
        yield path, partial(Run(path.parent).read_json, path.name)
    trees = (
        *(run.folder / DETECTION).glob("*/*.safetensors"),
        *(run.folder / MODELS).glob("*/*.safetensors"),
    )
    for path in sorted(trees):
        yield path, partial(_tree, path)


def _tree(path: Path) -> None:
    try:
        load(path)
    except UserError as error:
        raise UserError(f"{error}; {remedy(path)}") from None


def _encoder(path: Path) -> None:
    with contextlib.suppress(MissingEncoderError):  # its digest is right; its code is not here
        load_encoder(path)


def _audit(path: Path) -> None:
    for _ in AuditLog(path).entries():
        pass


def _metrics(run: Run, path: Path) -> None:
    _ = run.metrics
    if not path.read_bytes().endswith(b"\n"):
        raise damaged(path, "its last line is incomplete, as a kill leaves it")


def _checkpoint(run: Run, path: Path) -> None:
    seed = load_checkpoint(path, round_of(path)).get("seed")
    if seed not in (None, here := recipe_of(run).seed):
        raise UserError(
            f"{path} belongs to a run of seed {seed}, and not {here}; restore this run's from a copy"
        )


def _client_state(path: Path) -> None:
    client, round = path.parent.name, path.stem
    if not (client.isdecimal() and round.isdecimal()):
        raise UserError(f"{path} is no client state, because its name has no client or no round; remove it")
    load(path, label(int(client), int(round)))


def _client_states(path: Path) -> None:
    try:
        table = read_table(path)
    except UserError as error:
        raise UserError(
            f"{error}; restore it from a copy, or resume the run, which names each client that needs it"
        ) from None
    for (client, round), place in table.items():
        tree.read(read_place(place), f"the state of client {client} in {path}", label(client, round))


def _has_digest(path: Path) -> bool:
    """Whether a file that could be read has a digest."""
    with path.open("rb") as file:
        start = file.read(1024)
    if path.suffix in (".safetensors", ".states"):
        return sealed(start) or has_digest(start)
    return not start or path.name == AUDIT or is_sealed_text(start)
