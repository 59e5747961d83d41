"""One call of ``benchmarks/gpu.sh``: runs the bench, then rows of tables, until the time is over; then packs.

It returns ``results.tar.gz`` (the bench, the state of each row, logs, and all of each run except the weights) and
``checkpoints.tar.NN``, the newest checkpoints of unfinished runs as far as they fit, the most advanced first. A
later call that receives these files continues those runs; the others start again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll.commands.gpu_sharing import CONTROL, mps
from atoll.core.checkpoints import checkpoint_files
from atoll.core.errors import UserError
from atoll.core.run_folder import Run
from atoll.data.sources import locate
from atoll.papers.reproduction import find_table, images_of

FILES, BYTES = 8, int(15.5 * 2**20)  # largest number and size of the returned files
PACKING = 40.0  # seconds reserved for stopping and packing
BENCH = 2 / 3  # most of a call's time for the bench, if the plan says nothing: rows advance in each call
STARTS = 5  # most starts of the bench
STALLED = 150.0  # seconds without a new value after which the bench is killed: most values take seconds
WEIGHTS = ("checkpoints", "*.safetensors", "report.html")  # files of a run that the results do not include
HERE = Path(__file__).parent


@dataclass
class Session:
    """A call: its folder, its device and its end."""

    work: Path
    device: str
    scale: str
    until: float
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def left(self) -> float:
        """Seconds left."""
        return self.until - time.monotonic()

    def atoll(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start an ``atoll`` command with a separate log file."""
        logs = self.work / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        with (logs / f"{name}.log").open("ab") as log:
            command = [sys.executable, "-m", "atoll.cli.main", *arguments]
            self.running[name] = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
            )
        return self.running[name]

    def look(self) -> None:
        """Wait a moment, and report the processes that have ended."""
        time.sleep(0.2)
        for name, process in list(self.running.items()):
            if process.poll() is not None:
                del self.running[name]
                say(f"{name}: exit {process.returncode}, {self.left:.0f} s left")

    def stop(self) -> None:
        """Interrupt all processes, and kill those that do not end; every run and the bench remain resumable."""
        for process in self.running.values():
            process.send_signal(signal.SIGINT)
        patience = time.monotonic() + PACKING / 2
        for name, process in self.running.items():
            try:
                process.wait(max(0.1, patience - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                with suppress(subprocess.TimeoutExpired):  # a process that hangs in the driver does not end
                    process.wait(5)
            say(f"{name}: stopped, exit {process.poll()}")
        self.running.clear()


def end(started: float, seconds: float) -> float:
    """When the work stops, by the monotonic clock; the seconds count from a call's start, before imports."""
    return time.monotonic() - (time.time() - started) + seconds - PACKING


def bench(session: Session, out: Path, share: float = BENCH, parts: Sequence[str] = ()) -> None:
    """Run the bench, which saves each value and skips those that it has; start it again if the GPU fails it.

    It is killed if it hangs at a value, which the next start skips, and interrupted when its share of the time is
    over. What it has found is copied as it comes, in case this process is killed.
    """
    rest = session.left * (1 - share)
    found = session.work / "bench.json"
    arguments = ["--out", str(found), "--device", session.device, "--scale", session.scale]
    arguments += ["--parts", *parts] if parts else []
    for _ in range(STARTS):
        process = session.atoll("bench", "bench", "gpu", *arguments)
        last = time.time()
        while session.running and session.left > rest:
            session.look()
            if found.is_file():
                out.mkdir(parents=True, exist_ok=True)
                shutil.copy(found, out)
                last = max(last, found.stat().st_mtime)
            if time.time() - last > STALLED:
                process.kill()
        if process.poll() in (0, 2) or session.left <= rest:
            session.stop()
            return


def check_images(waves: list[dict[str, Any]], folder: Path) -> None:
    """Check that the images of all rows are there, before the bench takes its minutes.

    Raises:
        UserError: Images are missing.
    """
    for wave in waves:
        for data in images_of(
            find_table(wave["table"], wave["rows"], wave.get("settings", []), 1, folder).rows
        ):
            if data.path:
                locate(data.path, f"the images of {wave['table']}")


def rows(session: Session, wave: dict[str, Any]) -> None:
    """Run some rows of a table in the given order, seed by seed, several at the same time."""
    table, common = wave["table"], [f"engine.device={session.device}", "engine.workers=1"]
    common += wave.get("settings", [])
    folder = session.work / "runs" / Path(table).stem
    waiting: OrderedDict[Path, list[str]] = OrderedDict()
    for seed, pattern in itertools.product(wave.get("seeds", [None]), wave["rows"]):
        settings = common if seed is None else [*common, f"seed={seed}"]
        job = find_table(table, [pattern], settings, 1, folder)
        for row in job.rows:
            waiting.setdefault(job.folders(row)[0], [row.name, "--set", *settings])
    together = wave.get("together", 1)
    with shared_gpu(session, together):
        try:
            while (waiting or session.running) and session.left > 0:
                while waiting and len(session.running) < together:
                    run, chosen = waiting.popitem(last=False)
                    if not Run(run).finished:
                        arguments = ["reproduce", table, "--out", str(folder), "--rows", *chosen]
                        session.atoll(f"{Path(table).stem}-{run.name}", *arguments)
                session.look()
        finally:
            session.stop()


@contextmanager
def shared_gpu(session: Session, together: int) -> Iterator[None]:
    """Let the kernels of several processes run at the same time, if NVIDIA's Multi-Process Service is installed.

    Without it, processes take turns on the GPU, and small networks leave much of each turn idle.
    """
    with ExitStack() as service:
        if together > 1 and session.device.startswith("cuda") and shutil.which(CONTROL):
            try:
                service.enter_context(mps())
            except (OSError, subprocess.SubprocessError) as error:
                say(f"the Multi-Process Service does not start, so processes take turns: {error}")
        yield


def unpack(previous: Path, work: Path) -> None:
    """Unpack the files of an earlier call; runs that already exist here are unchanged."""
    here = {path.parent for path in work.glob("runs/*/*/recipe.toml")}
    with ExitStack() as stack:
        whole = stack.enter_context(tempfile.TemporaryFile())
        for part in sorted(previous.glob("checkpoints.tar.*")):
            whole.write(part.read_bytes())
        archives = [stack.enter_context(tarfile.open(previous / "results.tar.gz"))]
        if whole.tell():
            whole.seek(0)
            archives.append(stack.enter_context(tarfile.open(fileobj=whole)))
        for archive in archives:
            members = [one for one in archive if not here & set((work / one.name).parents)]
            new = [one for one in members if one.name.startswith("runs/") or not (work / one.name).exists()]
            archive.extractall(work, new, filter="data")
    for run in map(Run, work.glob("runs/*/*")):
        if run.exists() and not run.finished and not checkpoint_files(run.checkpoints):
            shutil.rmtree(run.folder)  # its checkpoint did not fit: it starts again


def pack(session: Session, out: Path) -> None:
    """Pack the results, and the checkpoints that fit in addition."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("checkpoints.tar.*"):
        old.unlink()
    runs = [run for run in map(Run, sorted(session.work.glob("runs/*/*"))) if run.exists()]
    states = [state(run) for run in runs]
    (session.work / "results.json").write_text(json.dumps(states, indent=1, ensure_ascii=False) + "\n")
    with tarfile.open(out / "results.tar.gz", "w:gz") as archive:
        for path in sorted(session.work.rglob("*")):
            inside = path.relative_to(session.work)
            if path.is_file() and not any(
                part.match(w) for part in (inside, *inside.parents) for w in WEIGHTS
            ):
                archive.add(path, str(inside))
    (out / "bench.json").unlink(missing_ok=True)  # the archive has it
    room = (FILES - 1) * BYTES
    unfinished = [(one["share"], run) for one, run in zip(states, runs, strict=True) if not one["finished"]]
    with tempfile.TemporaryFile() as whole:
        with tarfile.open(fileobj=whole, mode="w") as archive:
            for _, run in sorted(unfinished, key=lambda pair: -pair[0]):
                files = needed(run)
                size = sum(path.stat().st_size + 2048 for path in files)
                if size > room:
                    say(f"{run.folder.name}: its checkpoint, {size / 2**20:.0f} MiB, did not fit")
                    continue
                room -= size
                for path in files:
                    archive.add(path, str(path.relative_to(session.work)))
        whole.seek(0)
        number = 0
        while unfinished and (part := whole.read(BYTES)):
            (out / f"checkpoints.tar.{number:02d}").write_bytes(part)
            number += 1
    for one in states:
        say("  ".join(str(one[key]) for key in ("run", "round", "of", "results")))
    for path in sorted(out.iterdir()):
        say(f"{path.name}: {path.stat().st_size / 2**20:.1f} MiB")


def needed(run: Run) -> list[Path]:
    """Files from which a run continues: its newest checkpoint, and the client states."""
    newest = max(run.checkpoints.glob("round-*.safetensors"), default=None)
    clients = [path for path in (run.checkpoints / "clients").rglob("*") if path.is_file()]
    return [] if newest is None else [newest, *clients]


def state(run: Run) -> dict[str, Any]:
    """Progress and results of a run."""
    of = tomllib.loads((run.folder / "recipe.toml").read_text())["train"]["rounds"]
    done = max((line["round"] for line in run.metrics), default=0)
    results = {
        k: v for k, v in (run.read_json("evaluation.json") or {}).items() if isinstance(v, int | float)
    }
    return {
        "run": f"{run.folder.parent.name}/{run.folder.name}", "finished": run.finished, "round": done, "of": of,
        "share": done / max(of, 1), "results": results,
    }  # fmt: skip


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


def main() -> int:
    """Work until the time is over, and pack."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--previous", type=Path)
    parser.add_argument("--started", type=float, default=time.time(), help="Unix time of the call's start")
    options = parser.parse_args()
    variable = os.environ.get
    work = Path(variable("ATOLL_GPU_WORK") or tempfile.gettempdir() + "/atoll-gpu").resolve()
    work.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("ATOLL_CACHE", str(work.with_name(work.name + "-cache")))
    until = end(options.started, float(variable("ATOLL_GPU_SECONDS", "560")))
    session = Session(work, variable("ATOLL_GPU_DEVICE", "cuda"), variable("ATOLL_GPU_SCALE", "full"), until)
    plan = Path(variable("ATOLL_GPU_PLAN", str(HERE / "plan.toml")))
    planned = tomllib.loads(plan.read_text())
    waves = planned["rows"]
    try:
        check_images(waves, work)
    except UserError as error:
        parser.error(str(error))
    if options.previous:
        unpack(options.previous, work)
    for interruption in (signal.SIGTERM, signal.SIGINT):  # a background process of a shell ignores SIGINT
        signal.signal(interruption, signal.default_int_handler)
    try:
        bench(session, options.out, planned.get("bench", BENCH), planned.get("parts", ()))
        for wave in waves:
            rows(session, wave)
    except KeyboardInterrupt:
        say("interrupted: packing the existing results")
    session.stop()
    pack(session, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
