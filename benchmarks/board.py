"""The board in docs/board.md: runs its entries one after another, and makes its tables from their records.

    python benchmarks/board.py all --data DIR         # all missing entries; SIGTERM stops it after a round
    python benchmarks/board.py next --data DIR        # only the next missing entry
    python benchmarks/board.py run ssd 0 --data DIR   # one row's seed, its tuning runs first
    python benchmarks/board.py table                  # docs/board.md and docs/board.svg

DIR holds ``cifar10/`` and, for FedCA, ``tiny-imagenet/``, as ATOLL_DATA does. The rows are in ``board.toml``. An
entry is one training run; its record is one JSON file under ``results/board/``. An entry with a record is not run
again, and an interrupted run continues from its last complete round.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import signal
import sys
import tomllib
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision

import atoll
import board_page
from atoll.core.environment import environment
from atoll.core.errors import RunError
from atoll.core.provenance import version
from board_rows import RESULTS, SELECT, Board, Entry, Record

MADE = ("version", "seconds", "environments")  # of an evaluation: how it was made, not what it found


class StopAsked(BaseException):
    """SIGTERM was received, and the round is complete."""


class StopAfterRound(atoll.Callback):
    """Callback that ends a run after the round in which SIGTERM is received; that round is already saved."""

    def __init__(self) -> None:
        self.stop = False
        signal.signal(signal.SIGTERM, self._request_stop)

    def _request_stop(self, *_: object) -> None:
        self.stop = True

    def round(self, record: object, line: Mapping[str, Any]) -> None:
        """Stop after a complete round if SIGTERM was received."""
        if self.stop:
            raise StopAsked


def hardware_and_versions() -> dict[str, str]:
    """Collect the hardware and versions on which a run's exact result depends."""
    found = environment(torch.device("cpu"), torch.get_num_threads())
    return {
        "processor": str(found["processor"]),
        "capability": str(found["cpu"]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "numpy": np.__version__,
    }


def without_places(table: Any) -> Any:
    """Reduce every path in a table to its last part, because folders differ between machines."""
    if not isinstance(table, dict):
        return table
    return {
        key: value.rpartition("/")[2]
        if key in ("path", "weights") and isinstance(value, str)
        else without_places(value)
        for key, value in table.items()
    }


def run(
    entry: Entry, work: Path, settings: Sequence[str] = (), callback: StopAfterRound | None = None
) -> Record:
    """Train an entry, or continue its training.

    Returns:
        The record of the entry; only ``made`` may differ in another run of the same code.
    """
    recipe = atoll.load_recipe(entry.recipe, [*entry.settings, f"seed={entry.seed}", *settings])
    folder, failed = atoll.Run(work / entry.name), {}
    try:
        atoll.simulate(recipe, folder.folder, resume=folder.exists(), callback=callback)
    except RunError as error:  # a diverged run is a valid result
        failed = {"failed": str(error)}
    lines = folder.metrics
    evaluation = {} if failed else folder.results
    return {
        "entry": entry.name,
        "seed": entry.seed,
        "recipe": without_places(tomllib.loads(folder.recipe_path.read_text("utf-8"))),
        "rounds": [{key: value for key, value in line.items() if key != "seconds"} for line in lines],
        "evaluation": {key: value for key, value in evaluation.items() if key not in MADE},
        **failed,
        "made": {
            "version": evaluation.get("version") or version(),
            "training_seconds": round(sum(line.get("seconds", 0.0) for line in lines), 1),
            "threads": recipe.engine.threads,
            **hardware_and_versions(),
        },
    }


def to_json(record: Record) -> str:
    """Serialise a record as JSON with one line per key."""
    parts = (f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in record.items())
    return "{\n" + ",\n".join(parts) + "\n}\n"


def run_and_save(
    results: Path, entry: Entry, work: Path, settings: Sequence[str], callback: StopAfterRound
) -> None:
    """Run an entry and save its record."""
    print(f"{entry.name} …", flush=True)
    record = run(entry, work, settings, callback)
    path = results / f"{entry.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(to_json(record), "utf-8")
    part.replace(path)  # atomic
    outcome = record.get("failed") or f"probe {100 * record['evaluation'].get(SELECT, math.nan):.2f} %"
    print(f"{entry.name}: {outcome}, {record['made']['training_seconds']:.0f} s of training", flush=True)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", nargs="?", default="table", choices=("all", "next", "run", "table"))
    parser.add_argument("row", nargs="?", help="of run")
    parser.add_argument("seed", nargs="?", type=int, help="of run")
    parser.add_argument("--protocol", default="short", choices=("short", "long"))
    parser.add_argument("--data", type=Path, help="the folder that holds cifar10/; default: ATOLL_DATA")
    parser.add_argument("--work", type=Path, default=Path("runs/board"), help="for the runs' folders")
    parser.add_argument("--results", type=Path, default=RESULTS, help="for the records")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings for experiments")
    args = parser.parse_args()
    board = Board(args.results)
    if args.command == "table":
        board_page.write(board)
        return 0
    if args.set and args.results == RESULTS:
        parser.error("--set changes the protocol; choose another folder for the records with --results")
    seeds = board.protocols[args.protocol]["seeds"]
    if args.command == "run" and (args.row not in board.rows or args.seed not in seeds):
        parser.error(f"run needs a row ({', '.join(board.rows)}) and one of the seeds {seeds}")
    if args.data:
        os.environ["ATOLL_DATA"] = str(args.data.absolute())
    callback = StopAfterRound()
    passed: list[str] = []
    rows = [args.row] if args.command == "run" else []
    while not callback.stop and (entry := board.missing(args.protocol, passed, rows, args.seed)):
        try:
            run_and_save(board.results, entry, args.work, args.set, callback)
        except StopAsked:
            break
        except Exception:
            if args.command != "all":
                raise
            traceback.print_exc()  # the other entries continue
            passed.append(entry.name)
        if args.command == "next":
            break
    if callback.stop:
        print("stopped; repeat the command to continue from the last complete round", flush=True)
    return 1 if passed else 0


if __name__ == "__main__":
    sys.exit(main())
