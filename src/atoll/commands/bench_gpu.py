"""``atoll bench gpu``: checks Atoll's results on a GPU and measures its speed, in a JSON file saved per value.

The most important part runs first, and each part has a time limit: a part that fails or exceeds its limit retains
its values and does not affect the others. A second call on the same device continues with the unfinished parts. A
value at which a process crashed, or was killed because it hung, counts as failed, and the next call skips it.
"""

from __future__ import annotations

import itertools
import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from atoll.commands.gpu_parts import (
    Bench,
    Found,
    correctness,
    overhead,
    peak,
    profile,
    replays,
    rounds,
    steps,
    variant,
    views,
    where_from,
)
from atoll.commands.gpu_scale import SCALES
from atoll.commands.gpu_sharing import sharing
from atoll.commands.gpu_tables import tables
from atoll.core.devices import check_device, find_device, repeat_results
from atoll.core.errors import RunError, UserError
from atoll.core.files import write_whole
from atoll.core.provenance import version
from atoll.core.threads import threads

MEASURED = (
    "now measured"  # the key of a part under which the file names the value that a process is measuring
)


@dataclass(frozen=True)
class Part:
    """A part of the measurement, and its time limit in seconds (checked after each value)."""

    measure: Callable[[Bench], Found]
    seconds: float


PARTS = {
    "correctness": Part(correctness, 60),
    "rounds": Part(rounds, 60),
    "replays": Part(replays, 60),
    "steps": Part(steps, 60),
    "graphs": Part(variant("graphs"), 20),
    "overhead": Part(overhead, 30),
    "views": Part(views, 20),
    "profile": Part(profile, 20),
    "peak": Part(peak, 10),
    "tables": Part(tables, 90),
    "any kernels": Part(variant("any kernels"), 20),
    "sharing": Part(sharing, 60),  # late, because the Multi-Process Service may hang
    "compiled": Part(variant("compiled"), 60),  # to compile an encoder takes up to a minute
    "compiled, graphs": Part(variant("compiled, graphs"), 60),
}


def bench_gpu(
    out: Path,
    device: str = "cuda",
    scale: str = "full",
    say: Callable[[str], None] = lambda line: None,
    parts: Sequence[str] = (),
) -> dict[str, Any]:
    """Measure all parts, or some, and write each value to a JSON file at once.

    Args:
        out: The file; finished parts of an earlier call on the same device are not measured again.
        device: A device, as in ``engine.device``.
        scale: ``"full"``, or ``"test"`` for a minute on a CPU.
        say: Receives a line after each part.
        parts: Names of the parts to measure, in this order; by default all.

    Raises:
        UserError: There is no part of such a name; or the device does not exist on this machine, or is a CPU at
            full scale.
        RunError: The GPU cannot be used any more by this process; the next call continues with the next value.
    """
    for name in parts:
        if name not in PARTS:
            raise UserError(f"the bench has no part {name!r}; the parts are {', '.join(map(repr, PARTS))}")
    check_device(device, "--device")
    if device != "cpu" and not torch.cuda.is_available():
        raise UserError("PyTorch finds no GPU here; try the parts with --device cpu --scale test")
    where = find_device(device, "--device")
    if where.type == "cpu" and scale == "full":
        raise UserError("the full scale takes a CPU many hours; add --scale test")
    repeat_results(where)  # as in a run
    bench, about = Bench(where, SCALES[scale]), _about(where, scale)
    record = _earlier(out, about) or {"about": about, "parts": {}}
    for name in parts or PARTS:
        part = PARTS[name]
        if record["parts"].get(name, {}).get("finished"):
            continue
        started = time.perf_counter()
        before = record["parts"].get(name, {})
        found = before.get("found", {})
        if MEASURED in before:
            found[before[MEASURED]] = {
                "ok": False,
                "error": "the process that measured it crashed or was killed",
            }
        entry: dict[str, Any] = {"finished": False, "found": found}
        record["parts"][name] = entry

        def begin(key: str, entry: dict[str, Any] = entry) -> None:
            entry[MEASURED] = key
            _save(out, record)

        try:
            with threads(1):  # the default of runs
                for key, value in part.measure(replace(bench, known=dict(found), begin=begin)):
                    entry.pop(MEASURED, None)
                    found[key] = value
                    entry["seconds"] = round(time.perf_counter() - started, 1)
                    _save(out, record)
                    if value.get("fatal"):
                        raise RunError(f"{name}, {key}: {value['error']}; call again for what is left")
                    if entry["seconds"] > part.seconds * bench.scale.patience:
                        break
                else:
                    entry["finished"] = True
        except RunError:
            raise
        except Exception as error:
            entry["error"] = f"{type(error).__name__}: {error}"
            entry["where"] = where_from(error)
        finally:  # also of an interruption: then the next call measures the value
            entry.pop(MEASURED, None)
            _save(out, record)
        if where.type == "cuda":
            torch.cuda.empty_cache()
        state = "finished" if entry["finished"] else entry.get("error", "out of time")
        say(f"{name}: {state}, {time.perf_counter() - started:.0f} s, {len(entry['found'])} values")
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
    """What an earlier call has found; the record of another device or version is moved aside."""
    try:
        record: dict[str, Any] = json.loads(out.read_text())
        if record["about"] == about:
            return record
    except (OSError, ValueError, KeyError, TypeError):
        return None
    number = next(n for n in itertools.count(1) if not out.with_stem(f"{out.stem}-{n}").exists())
    out.replace(out.with_stem(f"{out.stem}-{number}"))
    return None


def _save(out: Path, record: dict[str, Any]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode())
