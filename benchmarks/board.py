"""The board of docs/board.md: run its entries one after another, and make its tables from their records.

    python benchmarks/board.py all --data DIR         # until nothing is left; SIGTERM stops it after a round
    python benchmarks/board.py next --data DIR        # the next missing entry alone
    python benchmarks/board.py run ssd 0 --data DIR   # one row's seed, its tuning runs first
    python benchmarks/board.py table                  # docs/board.md and docs/board.svg

DIR holds ``cifar10/`` and, for FedCA, ``tiny-imagenet/``, as ATOLL_DATA does. The rows stand in ``board.toml``. An
entry is one training run; its record is one JSON file under ``results/board/``. What has a record is not run again,
and an interrupted run goes on from its last complete round.
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
from atoll.core.errors import RunError
from board_rows import RESULTS, SELECT, Board, Entry, Record


class StopAsked(BaseException):
    """SIGTERM came, and the round is complete."""


class Watcher:
    """Ends a run after the round in which SIGTERM came; nothing is lost, because the round is kept by then."""

    def __init__(self) -> None:
        self.stop = False
        signal.signal(signal.SIGTERM, self._asked)

    def _asked(self, *_: object) -> None:
        self.stop = True

    def begin(self, federation: object, server: object) -> None:
        """Nothing to do."""

    def step(self, images: int) -> None:
        """Nothing to do."""

    def round(self, record: object, line: Mapping[str, Any]) -> None:
        """A round is complete."""
        if self.stop:
            raise StopAsked


def hardware_and_versions() -> dict[str, str]:
    """What a run's last bit depends on."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "numpy": np.__version__,
    }


def without_places(table: Any) -> Any:
    """A table in which every path is its last part alone: where the images lie belongs to a machine."""
    if not isinstance(table, dict):
        return table
    return {
        key: Path(value).name if key == "path" and isinstance(value, str) else without_places(value)
        for key, value in table.items()
    }


def run(entry: Entry, work: Path, settings: Sequence[str] = (), watcher: Watcher | None = None) -> Record:
    """Train an entry, or go on with it.

    Returns:
        Its record; what another run of the same code may have otherwise stands under ``made`` alone.
    """
    recipe = atoll.load_recipe(entry.recipe, [*entry.settings, f"seed={entry.seed}", *settings])
    folder, failed = atoll.Run(work / entry.name), {}
    try:
        atoll.simulate(recipe, folder.folder, resume=folder.exists(), watcher=watcher)
    except RunError as error:  # it diverged, which is a result like any other
        failed = {"failed": str(error)}
    lines = folder.metrics()
    evaluation = {} if failed else folder.read_json("evaluation.json")
    return {
        "entry": entry.name,
        "seed": entry.seed,
        "recipe": without_places(tomllib.loads(folder.recipe_path.read_text("utf-8"))),
        "rounds": [{key: value for key, value in line.items() if key != "seconds"} for line in lines],
        "evaluation": {key: value for key, value in evaluation.items() if key != "version"},
        **failed,
        "made": {
            "version": evaluation.get("version", atoll.__version__),
            "training_seconds": round(sum(line.get("seconds", 0.0) for line in lines), 1),
            "threads": recipe.engine.threads,
            **hardware_and_versions(),
        },
    }


def to_json(record: Record) -> str:
    """A line for each key."""
    parts = (f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in record.items())
    return "{\n" + ",\n".join(parts) + "\n}\n"


def play(board: Board, entry: Entry, work: Path, settings: Sequence[str], watcher: Watcher) -> None:
    """Run an entry and keep its record."""
    print(f"{entry.name} …", flush=True)
    record = run(entry, work, settings, watcher)
    path = board.results / f"{entry.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(to_json(record), "utf-8")
    part.replace(path)  # whole or not at all
    said = record.get("failed") or f"probe {100 * record['evaluation'].get(SELECT, math.nan):.2f} %"
    print(f"{entry.name}: {said}, {record['made']['training_seconds']:.0f} s of training", flush=True)


def main() -> int:
    """The command."""
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
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="to try things out")
    args = parser.parse_args()
    board = Board(args.results)
    if args.command == "table":
        board_page.write(board)
        return 0
    if args.set and args.results == RESULTS:
        parser.error("--set makes other runs than the protocol's; give their records a folder with --results")
    seeds = board.protocols[args.protocol]["seeds"]
    if args.command == "run" and (args.row not in board.rows or args.seed not in seeds):
        parser.error(f"run needs a row ({', '.join(board.rows)}) and one of the seeds {seeds}")
    if args.data:
        os.environ["ATOLL_DATA"] = str(args.data.absolute())
    watcher = Watcher()
    passed: list[str] = []
    rows = [args.row] if args.command == "run" else []
    while not watcher.stop and (entry := board.missing(args.protocol, passed, rows, args.seed)):
        try:
            play(board, entry, args.work, args.set, watcher)
        except StopAsked:
            break
        except Exception:
            if args.command != "all":
                raise
            traceback.print_exc()  # the other entries need not wait until someone looks
            passed.append(entry.name)
        if args.command == "next":
            break
    if watcher.stop:
        print("stopped; the same command goes on from the last complete round", flush=True)
    return 1 if passed else 0


if __name__ == "__main__":
    sys.exit(main())
