"""``atoll bench gpu``: whether Atoll is right on a GPU, and how fast it is there; one JSON, saved as it grows.

The most valuable part comes first, and each has its share of the time: one that fails, or runs out of it, keeps
what it found and leaves the others theirs. A second call on the same device goes on with what is not finished.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from atoll.commands.gpu_parts import (
    SCALES,
    Bench,
    Found,
    correctness,
    overhead,
    peak,
    profile,
    steps,
    tables,
    views,
    where_from,
)
from atoll.core.errors import UserError
from atoll.core.files import write_whole
from atoll.core.provenance import version
from atoll.core.threads import threads


@dataclass(frozen=True)
class Part:
    """What is measured, and for how many seconds at most (it ends with the value in hand)."""

    measure: Callable[[Bench], Found]
    seconds: float


PARTS = {
    "correctness": Part(correctness, 150),
    "views": Part(views, 30),
    "peak": Part(peak, 15),
    "steps": Part(steps, 90),
    "profile": Part(profile, 40),
    "overhead": Part(overhead, 40),
    "tables": Part(tables, 135),
}


def bench_gpu(
    out: Path, device: str = "cuda", scale: str = "full", say: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Measure all parts, and write them to a JSON file as they come.

    Args:
        out: the file; what it holds of an earlier call on the same device is not measured again.
        device: as ``engine.device`` has it.
        scale: ``"full"``, or ``"test"`` for a minute on a CPU.
        say: is told each part's end.

    Raises:
        UserError: there is no such device here.
    """
    where = torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise UserError("PyTorch sees no GPU here; try the parts with --device cpu --scale test")
    bench, about = Bench(where, SCALES[scale]), _about(where, scale)
    record = _earlier(out, about) or {"about": about, "parts": {}}
    for name, part in PARTS.items():
        if record["parts"].get(name, {}).get("finished"):
            continue
        began = time.perf_counter()
        told: dict[str, Any] = {"finished": False, "found": {}}
        record["parts"][name] = told
        try:
            with threads(1):  # as runs have it
                for key, value in part.measure(bench):
                    told["found"][key] = value
                    told["seconds"] = round(time.perf_counter() - began, 1)
                    _save(out, record)
                    if told["seconds"] > part.seconds * bench.scale.patience:
                        break
                else:
                    told["finished"] = True
        except Exception as error:
            told["error"] = f"{type(error).__name__}: {error}"
            told["where"] = where_from(error)
        _save(out, record)
        if where.type == "cuda":
            torch.cuda.empty_cache()
        state = "finished" if told["finished"] else told.get("error", "out of time")
        say(f"{name}: {state}, {time.perf_counter() - began:.0f} s, {len(told['found'])} values")
    return record


def _about(device: torch.device, scale: str) -> dict[str, Any]:
    gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if gpu else platform.machine(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if gpu else None,
        "python": platform.python_version(),
        "atoll": version(),
        "scale": scale,
    }


def _earlier(out: Path, about: dict[str, Any]) -> dict[str, Any] | None:
    try:
        record: dict[str, Any] = json.loads(out.read_text())
        return record if record["about"] == about else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _save(out: Path, record: dict[str, Any]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode())
