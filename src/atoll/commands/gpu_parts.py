"""Parts of ``atoll bench gpu``: each yields named values, the most important first."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from atoll.commands.gpu_scale import Scale
from atoll.commands.gpu_workloads import (
    METHOD_NEEDS,
    ROUND,
    Workload,
    bare_round,
    digits_workload,
    full_float32,
    one_client_round,
    synthetic_workload,
    wait_for,
)
from atoll.data.client_data import batches_in_a_pass
from atoll.data.views.views import ViewOptions, make_views
from atoll.engines.step_graphs import can_replay

Found = Iterator[tuple[str, Any]]
LONGEST_TIMING = 0.5  # seconds
TOLERANCE = 1e-4  # largest relative difference of a first loss from the CPU's, in float32
PRECISIONS = {  # of a step: TF32 in matrix products and convolutions, and the recipe's settings
    "bf16": (True, ("train.amp=true", "engine.channels_last=true")),
    "tf32": (True, ("train.amp=false", "engine.channels_last=false")),
    "fp32": (False, ("train.amp=false", "engine.channels_last=false")),
}
VARIANTS = {  # of a step
    "": (),
    "graphs": ("train.cuda_graphs=true",),
    "compiled": ("train.compile=true",),
    "compiled, graphs": ("train.compile=true", "train.cuda_graphs=true"),
    "any kernels": ("engine.deterministic=false",),
}
ENCODERS = {
    "resnet18": ("model.encoder=resnet18", "model.stem=cifar"),
    "resnet-narrow": ("model.encoder=resnet-narrow", "model.width=4", "model.projector_hidden=[16]"),
    "vit-narrow": ("model.encoder=vit-tiny", "model.width=64", "model.patch=16", "model.depth=1"),
    "vit-s": ("model.encoder=vit-tiny", "model.width=384", "model.patch=16", "model.depth=12"),
}


@dataclass(frozen=True)
class Bench:
    """Device and extent of the measurement, and the values of the part that an earlier call has measured.

    ``begin`` is called with the name of each value before it is measured.
    """

    device: torch.device
    scale: Scale
    known: dict[str, Any] = field(default_factory=dict)
    begin: Callable[[str], None] = lambda name: None

    def seconds(self, work: Callable[[], Any], together: int = 1) -> float:
        """Measure the median time of one call, including the device's work; slow work is called less often.

        Args:
            work: The work.
            together: Number of consecutive calls of which one does some work for all, such as making their batches.
        """
        for _ in range(self.scale.warm):
            work()
        once = self._mean(work, together)
        count = max(1, min(self.scale.timed, int(LONGEST_TIMING / once)))
        count = math.ceil(count / together) * together
        return sorted(self._mean(work, count) for _ in range(3))[1]

    def _mean(self, work: Callable[[], Any], count: int) -> float:
        wait_for(self.device)
        started = time.perf_counter()
        for _ in range(count):
            work()
        wait_for(self.device)
        return (time.perf_counter() - started) / count

    def new(self, values: Mapping[str, Callable[[], Any]]) -> Found:
        """Measure the values that are not known yet; the failure of one does not affect the others."""
        for name, measure in values.items():
            if name not in self.known:
                self.begin(name)
                yield name, attempt(measure)

    def workload(self, encoder: str, batch: int, side: int, precision: str, variant: str = "") -> Workload:
        """Create a client of SSD's recipe with another encoder, on images of noise."""
        settings = (*ENCODERS[encoder], *PRECISIONS[precision][1], *VARIANTS[variant])
        sizes = f"train.batch_size={batch}", f"data.image_size={side}"
        return synthetic_workload("ssd-paper", (*settings, *sizes), self.device)


def correctness(bench: Bench) -> Found:
    """Compare each method's first loss with the CPU's, in float32, and the weights of two runs of a round."""
    yield from bench.new({name: partial(_first_loss, bench, name) for name in bench.scale.methods})


def _first_loss(bench: Bench, name: str) -> dict[str, Any]:
    settings = [*bench.scale.digits, f"method.name={name}", *METHOD_NEEDS.get(name, ())]
    with full_float32():
        on_cpu, on_device = (
            digits_workload(settings, device) for device in (torch.device("cpu"), bench.device)
        )
        expected, loss = on_cpu.first_loss(), on_device.first_loss()
        difference = abs(loss - expected) / max(1.0, abs(expected))
        first, second = one_client_round(on_device), one_client_round(on_device)
    moved = max(float((first[key] - second[key]).abs().max()) for key in first) if first else 0.0
    found = {"loss": loss, "cpu": expected, "difference": difference, "ok": difference <= TOLERANCE}
    return {**found, "two_runs_equal": moved == 0.0, "two_runs_differ_by": moved}


def rounds(bench: Bench) -> Found:
    """Train two rounds with what a run does on a GPU by default, of two epochs, and with optimisers that are kept.

    The losses must be finite, and all updates accepted.
    """
    yield from bench.new({name: partial(_two_rounds, bench, name) for name in bench.scale.methods})


def _two_rounds(bench: Bench, name: str) -> dict[str, Any]:
    usual = ("train.amp=true", "engine.channels_last=auto", "train.epochs=2", "train.keep_optimizer=true")
    settings = [*usual, *bench.scale.digits, f"method.name={name}", *METHOD_NEEDS.get(name, ())]
    work = digits_workload(settings, bench.device)
    records = [work.federated_round() for _ in range(ROUND)]
    losses = [record.losses.get("loss", 0.0) for record in records]
    accepted = all(record.clients == work.federation.setting.cohort_size for record in records)
    return {"losses": losses, "ok": accepted and all(map(math.isfinite, losses))}


def replays(bench: Bench) -> Found:
    """Compare a client's round with recorded steps and without, for each method whose steps can be replayed."""
    yield from bench.new({name: partial(_replayed, bench, name) for name in bench.scale.methods})


def _replayed(bench: Bench, name: str) -> dict[str, Any]:
    settings = ["train.amp=true", "engine.channels_last=auto", *bench.scale.digits, f"method.name={name}"]
    settings += [*METHOD_NEEDS.get(name, ()), "train.epochs=6"]
    usual, recorded = (
        digits_workload([*settings, f"train.cuda_graphs={graphs}"], bench.device)
        for graphs in ("false", "true")
    )
    plain, replayed = one_client_round(usual), one_client_round(recorded)
    differ = [name for name, weight in plain.items() if not torch.equal(replayed[name], weight)]
    graph = recorded.client.graph
    replayed_steps = graph is not None and graph.recorded
    wanted = bench.device.type == "cuda" and can_replay(recorded.method, recorded.federation.recipe.train)
    return {"ok": not differ and replayed_steps == wanted, "replayed": replayed_steps, "differ": differ}


def views(bench: Bench) -> Found:
    """Measure views per second of images on the device, and the time of the random draw alone, on the CPU."""
    yield from bench.new(
        {
            f"{preset} {n}×{side}px": partial(_views, bench, preset, n, side)
            for preset in ("ssd", "simclr", "l-dawa")
            for n, side in bench.scale.view_batches
        }
    )


def _views(bench: Bench, preset: str, n: int, side: int) -> dict[str, float]:
    made = make_views(ViewOptions(preset=preset), side, 3)
    images = torch.randint(256, (n, 3, side, side), dtype=torch.uint8).to(bench.device)
    draws = torch.Generator().manual_seed(0)
    both = bench.seconds(partial(made, images, draws))
    draw = bench.seconds(partial(made.draw, n, draws, source=images.shape[-2:]))
    batches = batches_in_a_pass(2 * n * made.values(images.shape[-2:]))
    many = images.repeat(batches, 1, 1, 1)
    a_pass = bench.seconds(partial(made.make, many, [draws, draws], sizes=[n] * batches))
    return {
        "views_a_second": n / both,
        "ms": 1e3 * both,
        "draw_ms": 1e3 * draw,
        "batches_in_a_pass": batches,
        "views_a_second_in_passes": 2 * n * batches / a_pass,
    }


def peak(bench: Bench) -> Found:
    """Measure operations per second of a large matrix product in each precision, as the reference of the steps."""
    yield from bench.new({name: partial(_peak, bench, name) for name in PRECISIONS})


def _peak(bench: Bench, precision: str) -> dict[str, float]:
    n = bench.scale.matmul
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = (torch.randn(n, n, device=bench.device, dtype=kind) for _ in range(2))
    with full_float32(not PRECISIONS[precision][0]):
        seconds = bench.seconds(partial(torch.matmul, a, b))
    return {"tflops": 2 * n**3 / seconds / 1e12}


def steps(bench: Bench) -> Found:
    """Measure samples per second of a training step on prepared batches, and its operations per second."""
    yield from _steps(bench, PRECISIONS)


def variant(name: str) -> Callable[[Bench], Found]:
    """Make the part that measures the steps in bfloat16 with the settings of a variant."""
    return partial(_steps, precisions=("bf16",), variant=name)


def _steps(bench: Bench, precisions: Iterable[str], variant: str = "") -> Found:
    peak_of = cache(partial(_peak, bench))
    yield from bench.new(
        {
            f"{encoder} {batch}×{side}px {precision} {variant}".rstrip(): partial(
                _step, bench, (encoder, batch, side, precision, variant), peak_of
            )
            for precision in precisions
            for encoder, batch, side in bench.scale.steps
        }
    )


def _step(
    bench: Bench, kind: tuple[str, int, int, str, str], peak_of: Callable[[str], dict[str, float]]
) -> dict[str, Any]:
    _, batch, _, precision, _ = kind
    work = bench.workload(*kind)  # which chooses float32, as a run does
    with full_float32(not PRECISIONS[precision][0]):
        tflop = work.operations() / 1e12
        if bench.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(bench.device)
        seconds = bench.seconds(work.step)
    return {
        "samples_a_second": batch / seconds,
        "ms": 1e3 * seconds,
        "tflops": tflop / seconds,
        "share_of_peak": tflop / seconds / peak_of(precision)["tflops"],
        "memory_mib": _memory(bench.device),
    }


def profile(bench: Bench) -> Found:
    """Profile the first step: its kernels by their time on the device, and the device's idle time."""

    @cache
    def timed() -> dict[str, tuple[Callable[[], None], float, int]]:
        work = bench.workload(*bench.scale.steps[0], "bf16")
        calls = {"prepared batches": work.step, "with views": work.step_with_views}
        return {
            kind: (call, bench.seconds(call, work.in_a_pass), work.in_a_pass) for kind, call in calls.items()
        }

    # All are timed before the first is profiled: the profiler slows all later calls of its process.
    kinds = ("prepared batches", "with views")
    yield from bench.new({kind: partial(_profile, bench, timed, kind) for kind in kinds})


def _profile(
    bench: Bench, timed: Callable[[], dict[str, tuple[Callable[[], None], float, int]]], kind: str
) -> dict[str, Any]:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    gpu, (call, seconds, in_a_pass) = bench.device.type == "cuda", timed()[kind]
    calls = math.ceil(10 / in_a_pass) * in_a_pass
    with record(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]) as recorded:
        for _ in range(calls):
            call()
        wait_for(bench.device)
    attribute = "self_device_time_total" if gpu else "self_cpu_time_total"
    kernels = [
        (event.key, getattr(event, attribute) / calls, event.count / calls)
        for event in recorded.key_averages()
        # The spans of optimisers' steps stand among a GPU's kernels.
        if not gpu or (event.device_type.name == "CUDA" and not event.is_user_annotation)
    ]
    kernels.sort(key=lambda kernel: -kernel[1])
    busy = sum(time for _, time, _ in kernels) / 1e6
    table = [{"kernel": key[:120], "us": time, "calls": count} for key, time, count in kernels]
    return {"ms": 1e3 * seconds, "busy_ms": 1e3 * busy, "idle_share": 1 - busy / seconds, "top": table[:25]}


def overhead(bench: Bench) -> Found:
    """Time a federated round and a bare loop over the same batches and views, in turns; the fastest of three."""
    yield from bench.new({"a round": partial(_overhead, bench)})


def _overhead(bench: Bench) -> dict[str, float]:
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
    return {
        "federated_seconds": federated,
        "bare_seconds": bare,
        "overhead": federated / bare - 1,
        "views_a_second": 2 * seen / federated,
    }


def attempt(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Measure, or say why it failed; ``"fatal"`` means that this process can use the GPU no more."""
    try:
        return measure()
    except Exception as error:
        found = {"ok": False, "error": f"{type(error).__name__}: {error}", "where": where_from(error)}
        broken = any(isinstance(one, torch.AcceleratorError) for one in (error, error.__cause__))
        return {**found, "fatal": True} if broken else found


def where_from(error: BaseException) -> str:
    """Innermost lines of an error's traceback."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    return " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames))


def _memory(device: torch.device) -> float | None:
    return torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None
