"""The part of ``atoll bench gpu`` that compares ways to train several small clients on one GPU at once."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from atoll.commands.gpu_parts import Bench, Found
from atoll.commands.run import run_recipe
from atoll.core.errors import UserError
from atoll.core.variables import environment_variables
from atoll.recipe.recipe import load_recipe

SMALL = (  # clients of FedQuad's paper, on the digits, with about as many steps
    "data.source=digits", "data.path=", "data.image_size=32", "partition.kind=iid",
    "train.rounds=3", "train.epochs=10", "train.batch_size=32", "evaluation.at_end=[]",
)  # fmt: skip
WITH_MPS = "processes with MPS"
CONTROL = "nvidia-cuda-mps-control"  # of NVIDIA's Multi-Process Service (MPS)


def sharing(bench: Bench) -> Found:
    """Time a round of ten small clients: in processes, with and without MPS, and on streams or stacked in one."""
    ways = {"processes: 1": partial(_seconds, bench, "engine.workers=1")}
    for count in bench.scale.shared:
        ways[f"processes: {count}"] = partial(_seconds, bench, f"engine.workers={count}")
        ways[f"streams: {count}"] = partial(_seconds, bench, f"engine.streams={count}")
        ways[f"stacked: {count}"] = partial(_seconds, bench, f"engine.stack={count}")
    yield from bench.new(ways)
    if bench.device.type == "cuda":
        yield from _with_mps(bench)


def _with_mps(bench: Bench) -> Found:
    """Time processes with MPS, until it fails: a hang costs minutes, and a service that hung would hang again."""
    failed = any(WITH_MPS in name and "error" in value for name, value in bench.known.items())
    for count in bench.scale.shared:
        if failed:
            return
        for name, value in bench.new({f"{WITH_MPS}: {count}": partial(_seconds_with_mps, bench, count)}):
            failed = "error" in value
            yield name, value


def _seconds_with_mps(bench: Bench, count: int) -> dict[str, float]:
    with mps():
        return _seconds(bench, f"engine.workers={count}")


def _seconds(bench: Bench, way: str) -> dict[str, float]:
    settings = [*SMALL, *bench.scale.small, f"engine.device={bench.device}", way]
    with tempfile.TemporaryDirectory() as folder:
        run = run_recipe(load_recipe("fedquad-paper", settings), Path(folder) / "run")
        # In the first round, processes start.
        return {"seconds": min(float(line["seconds"]) for line in run.metrics[1:])}


@contextmanager
def mps() -> Iterator[None]:
    """Run NVIDIA's Multi-Process Service for processes that start within the context; it changes no setting.

    Raises:
        UserError: It is not installed.
        OSError, subprocess.SubprocessError: It does not start.
    """
    control = shutil.which(CONTROL)
    if control is None:
        raise UserError(f"{CONTROL} is not installed")
    # What was measured counts, even if the service does not end in time and still writes its logs.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        places = {f"CUDA_MPS_{name}_DIRECTORY": Path(folder, name.lower()) for name in ("PIPE", "LOG")}
        for place in places.values():
            place.mkdir()
        with environment_variables({name: str(place) for name, place in places.items()}):
            subprocess.run([control, "-d"], check=True, timeout=30)  # noqa: S603
            try:
                yield
            finally:
                with suppress(subprocess.TimeoutExpired):
                    subprocess.run([control], input="quit\n", text=True, check=False, timeout=10)  # noqa: S603
