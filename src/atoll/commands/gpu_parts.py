"""Parts of ``atoll bench gpu``: each yields named values, the most important first."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from atoll.commands.gpu_workloads import (
    METHOD_NEEDS,
    Workload,
    bare_round,
    digits_workload,
    full_float32,
    one_client_round,
    synthetic_workload,
    wait_for,
)
from atoll.core.config import describe
from atoll.data.views.views import ViewOptions, make_views
from atoll.methods.registry import METHODS
from atoll.papers.images import PUBLIC_SETS
from atoll.papers.reproduction import find_table
from atoll.papers.tables import table_names
from atoll.recipe.recipe import Recipe, make_recipe

Found = Iterator[tuple[str, Any]]
TOLERANCE = 1e-4  # largest relative difference of a first loss from the CPU's, in float32
PRIVATE_IMAGES = {"amazon-packages": 80_000}  # "around", Dec-SSL, Section 3.1
# The tables that are measured first, the most important ones; the others follow by name.
FIRST_TABLES = ("fedquad-1", "fedquad-2", "ssd-1", "l-dawa-6")


@dataclass(frozen=True)
class Scale:
    """Extent of the measurement.

    Attributes:
        methods: Methods to check.
        matmul: Side of the matrices whose product gives the peak.
        view_batches: (images, side) of the augmentation's batches.
        steps: (encoder, batch, side) of the training steps.
        warm: Number of calls before the timing starts.
        timed: Number of calls in one timing; there are three timings.
        clients: Number of clients in the federated round that is compared with a bare loop.
        batches: Number of batches of each client.
        shared: Numbers of small clients that train on one GPU at once (see `gpu_sharing`).
        tables: Tables whose duration is projected.
        patience: Factor of the parts' time limits.
        digits: Settings of the recipe that methods are checked with.
        small: Settings of the small clients.
        settings: Settings of the tables' recipes.
    """

    methods: tuple[str, ...]
    matmul: int
    view_batches: tuple[tuple[int, int], ...]
    steps: tuple[tuple[str, int, int], ...]
    warm: int
    timed: int
    clients: int
    batches: int
    shared: tuple[int, ...]
    tables: tuple[str, ...]
    patience: float = 1.0
    digits: tuple[str, ...] = ()
    small: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()


SCALES = {
    "full": Scale(
        methods=tuple(sorted(METHODS)),
        matmul=8192,
        view_batches=((512, 32), (128, 32), (128, 224)),
        steps=(("resnet18", 512, 32), ("resnet18", 128, 32), ("vit-s", 256, 224)),
        warm=5,
        timed=20,
        clients=4,
        batches=25,
        shared=(10, 5, 2),
        tables=(*FIRST_TABLES, *(name for name in table_names() if name not in FIRST_TABLES)),
    ),
    "test": Scale(
        methods=("fed_simclr", "ssd"),
        matmul=64,
        view_batches=((8, 32),),
        steps=(("resnet-narrow", 4, 16), ("vit-narrow", 2, 32)),
        warm=1,
        timed=1,
        clients=2,
        batches=2,
        shared=(2,),
        tables=("fedquad-1",),
        patience=100,
        digits=("data.limit=64", "train.batch_size=8", "model.width=4", "model.projector_hidden=[16]"),
        small=("data.limit=64", "train.epochs=1"),
        settings=("train.batch_size=4",),
    ),
}
PRECISIONS = {  # of a step: TF32 in matrix products and convolutions, and the recipe's settings
    "bf16": (True, ("train.amp=true", "engine.channels_last=true")),
    "tf32": (True, ("train.amp=false", "engine.channels_last=false")),
    "fp32": (False, ("train.amp=false", "engine.channels_last=false")),
}
ENCODERS = {
    "resnet18": (),
    "resnet-narrow": ("model.encoder=resnet-narrow", "model.width=4", "model.projector_hidden=[16]"),
    "vit-narrow": ("model.encoder=vit-tiny", "model.width=64", "model.patch=16", "model.depth=1"),
    "vit-s": ("model.encoder=vit-tiny", "model.width=384", "model.patch=16", "model.depth=12"),
}


@dataclass(frozen=True)
class Bench:
    """Device and extent of the measurement."""

    device: torch.device
    scale: Scale

    def seconds(self, work: Callable[[], Any]) -> float:
        """Measure the median time of one call, including the device's work."""
        for _ in range(self.scale.warm):
            work()
        times = []
        for _ in range(3):
            wait_for(self.device)
            started = time.perf_counter()
            for _ in range(self.scale.timed):
                work()
            wait_for(self.device)
            times.append((time.perf_counter() - started) / self.scale.timed)
        return sorted(times)[1]

    def workload(self, encoder: str, batch: int, side: int, precision: str) -> Workload:
        """Create a client of SSD's recipe with another encoder, on images of noise."""
        settings = (*ENCODERS[encoder], *PRECISIONS[precision][1], f"train.batch_size={batch}")
        return synthetic_workload("ssd-paper", (*settings, f"data.image_size={side}"), self.device)


def correctness(bench: Bench) -> Found:
    """Compare each method's first loss with the CPU's, in float32, and the weights of two runs of a round."""
    for name in bench.scale.methods:
        settings = [*bench.scale.digits, f"method.name={name}", *METHOD_NEEDS.get(name, ())]
        try:
            with full_float32():
                on_cpu, on_device = (
                    digits_workload(settings, device) for device in (torch.device("cpu"), bench.device)
                )
                expected, loss = on_cpu.first_loss(), on_device.first_loss()
                difference = abs(loss - expected) / max(1.0, abs(expected))
                first, second = one_client_round(on_device), one_client_round(on_device)
            moved = max(float((first[key] - second[key]).abs().max()) for key in first) if first else 0.0
            found = {"loss": loss, "cpu": expected, "difference": difference, "ok": difference <= TOLERANCE}
            yield name, {**found, "two_runs_equal": moved == 0.0, "two_runs_differ_by": moved}
        except Exception as error:  # the check of the other methods continues
            yield name, {"ok": False, "error": f"{type(error).__name__}: {error}", "where": where_from(error)}


def views(bench: Bench) -> Found:
    """Measure views per second of images on the device, and the time of the random draw alone, on the CPU."""
    for preset in ("ssd", "simclr", "l-dawa"):
        for n, side in bench.scale.view_batches:
            made = make_views(ViewOptions(preset=preset), side, 3)
            images = torch.randint(256, (n, 3, side, side), dtype=torch.uint8).to(bench.device)
            draws = torch.Generator().manual_seed(0)
            both = bench.seconds(partial(made, images, draws))
            draw = bench.seconds(partial(made.draw, n, draws, source=images.shape[-2:]))
            yield (
                f"{preset} {n}×{side}px",
                {"views_a_second": n / both, "ms": 1e3 * both, "draw_ms": 1e3 * draw},
            )


def peak(bench: Bench) -> Found:
    """Measure operations per second of a large matrix product in each precision, as the reference of the steps."""
    n = bench.scale.matmul
    for name, (tf32, _) in PRECISIONS.items():
        kind = torch.bfloat16 if name == "bf16" else torch.float32
        a, b = (torch.randn(n, n).to(bench.device, kind) for _ in range(2))
        with full_float32(not tf32):
            seconds = bench.seconds(partial(torch.matmul, a, b))
        yield name, {"tflops": 2 * n**3 / seconds / 1e12}


def steps(bench: Bench) -> Found:
    """Measure samples per second of a training step on prepared batches, and its share of the peak operations."""
    peaks = {name: value["tflops"] for name, value in peak(bench)}
    for encoder, batch, side in bench.scale.steps:
        for precision, (tf32, _) in PRECISIONS.items():
            with full_float32(not tf32):
                work = bench.workload(encoder, batch, side, precision)
                if bench.device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(bench.device)
                seconds = bench.seconds(work.step)
                tflops = work.operations() / seconds / 1e12
            yield (
                f"{encoder} {batch}×{side}px {precision}",
                {
                    "samples_a_second": batch / seconds,
                    "ms": 1e3 * seconds,
                    "tflops": tflops,
                    "share_of_peak": tflops / peaks[precision],
                    "memory_mib": _memory(bench.device),
                },
            )


def profile(bench: Bench) -> Found:
    """Profile the first step: its kernels by their time on the device, and the device's idle time."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    encoder, batch, side = bench.scale.steps[0]
    work = bench.workload(encoder, batch, side, "bf16")
    gpu = bench.device.type == "cuda"
    for kind, call in (("prepared batches", work.step), ("with views", work.step_with_views)):
        for _ in range(bench.scale.warm):
            call()
        wait_for(bench.device)
        with record(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]) as recorded:
            started = time.perf_counter()
            for _ in range(10):
                call()
            wait_for(bench.device)
            wall = time.perf_counter() - started
        attribute = "self_device_time_total" if gpu else "self_cpu_time_total"
        kernels = [
            (event.key, getattr(event, attribute), event.count)
            for event in recorded.key_averages()
            if not gpu or event.device_type.name == "CUDA"
        ]
        kernels.sort(key=lambda kernel: -kernel[1])
        busy = sum(time for _, time, _ in kernels) / 1e6
        table = [{"kernel": key[:120], "us": time / 10, "calls": count / 10} for key, time, count in kernels]
        yield (
            kind,
            {"ms": 1e2 * wall, "busy_ms": 1e2 * busy, "idle_share": 1 - busy / wall, "top": table[:25]},
        )


def overhead(bench: Bench) -> Found:
    """Time a federated round and a bare loop over the same batches and views, in turns; the fastest of three."""
    encoder, batch, side = bench.scale.steps[0]
    settings = (*ENCODERS[encoder], *PRECISIONS["bf16"][1], f"train.batch_size={batch}")
    settings = (*settings, "method.name=fed_simclr", f"data.image_size={side}", "train.epochs=1")
    clients, batches = bench.scale.clients, bench.scale.batches
    work = synthetic_workload("cifar10-cpu", settings, bench.device, clients, batches)
    times: dict[str, list[float]] = {"federated": [], "bare": []}
    for _ in range(4):
        for name, run in (("federated", work.federated_round), ("bare", lambda: bare_round(work))):
            wait_for(bench.device)
            started = time.perf_counter()
            run()
            wait_for(bench.device)
            times[name].append(time.perf_counter() - started)
    federated, bare = (min(each[1:]) for each in times.values())  # the first round is a warm-up
    seen = clients * batches * batch
    yield "seconds", {"federated": federated, "bare": bare}
    yield "overhead", federated / bare - 1
    yield "views_a_second", 2 * seen / federated


def tables(bench: Bench) -> Found:
    """Project the duration of each paper's table from the samples of its rows and the speed of their steps.

    Views are included, evaluation is not. Rows with the same training step are timed once, and rows with the same
    training are counted once.
    """
    speeds: dict[str, float] = {}
    for table in bench.scale.tables:
        rows: dict[str, dict[str, Any]] = {}
        job = find_table(table)
        for row in job.rows:
            recipe, first = row.recipe, job.trained_as[row.name]
            if first != row.name:
                rows[row.name] = {"trained_as": first}
                continue
            key = json.dumps(_training_key(recipe), sort_keys=True)
            try:
                if key not in speeds:
                    speeds[key] = _speed(bench, recipe)
                rows[row.name] = _projected(recipe, speeds[key])
            except Exception as error:
                rows[row.name] = {"error": f"{type(error).__name__}: {error}"}
        hours = [row["hours"] for row in rows.values() if "hours" in row]
        yield table, {"hours": sum(hours), "rows_counted": len(hours), "rows": rows}


def _training_key(recipe: Recipe) -> dict[str, Any]:
    table = describe(recipe)
    sections = {key: table[key] for key in ("views", "model", "method", "options")}
    return {
        **sections,
        "batch": recipe.train.batch_size,
        "data": [recipe.data.image_size, recipe.data.channels],
    }


def _speed(bench: Bench, recipe: Recipe) -> float:
    settings = (*PRECISIONS["bf16"][1], *bench.scale.settings)
    work = synthetic_workload(make_recipe(describe(recipe)), settings, bench.device)
    return work.batch_size / bench.seconds(work.step_with_views)


def _projected(recipe: Recipe, speed: float) -> dict[str, Any]:
    name = Path(recipe.data.path or "").name
    images = PRIVATE_IMAGES[name] if name in PRIVATE_IMAGES else PUBLIC_SETS[name].train
    train = recipe.train
    share = 1.0 if recipe.partition.kind == "centralised" else train.participation
    seen = images * share * train.rounds * train.epochs
    return {"samples_a_second": speed, "samples": seen, "hours": seen / speed / 3600}


def where_from(error: BaseException) -> str:
    """Innermost lines of an error's traceback."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    return " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames))


def _memory(device: torch.device) -> float | None:
    return torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None
