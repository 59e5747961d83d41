"""One call of ``benchmarks/gpu.sh``: the bench, then rows of tables, until the time is over; then it packs.

What comes back is ``results.tar.gz`` (the bench, what became of each row, logs, and all but the weights of each
run) and ``checkpoints.tar.NN``, the newest checkpoints of unfinished runs as far as they fit, the most advanced
first. A later call that gets these files goes on with those runs; the others begin again.
"""

from __future__ import annotations

import argparse
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
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll.commands.reproduce import find_table
from atoll.core.run_folder import Run

FILES, BYTES = 8, int(15.5 * 2**20)  # that come back, and the size of the largest
PACKING = 40.0  # seconds that stopping and packing may take
WEIGHTS = ("checkpoints", "*.safetensors", "report.html")  # of a run: not among the results
HERE = Path(__file__).parent


@dataclass
class Session:
    """A call: where it works, and until when."""

    work: Path
    device: str
    scale: str
    until: float
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def left(self) -> float:
        """Seconds."""
        return self.until - time.monotonic()

    def atoll(self, name: str, *arguments: str) -> None:
        """Start a command of Atoll's; what it says goes into a log of its own."""
        logs = self.work / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        with (logs / f"{name}.log").open("ab") as log:
            command = [sys.executable, "-m", "atoll.cli.main", *arguments]
            self.running[name] = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
            )

    def look(self) -> None:
        """Wait a moment, and say what has ended."""
        time.sleep(0.2)
        for name, process in list(self.running.items()):
            if process.poll() is not None:
                del self.running[name]
                say(f"{name}: exit {process.returncode}, {self.left:.0f} s left")

    def stop(self) -> None:
        """As Ctrl-C does, which leaves every run resumable; a process that does not end is killed: so does that."""
        for process in self.running.values():
            process.send_signal(signal.SIGINT)
        patience = time.monotonic() + PACKING / 2
        for name, process in self.running.items():
            try:
                process.wait(max(0.1, patience - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
            say(f"{name}: stopped, exit {process.wait()}")
        self.running.clear()


def bench(session: Session) -> None:
    """The bench; it saves as it goes, and skips what an earlier call finished."""
    out = session.work / "bench.json"
    arguments = ["--out", str(out), "--device", session.device, "--scale", session.scale]
    session.atoll("bench", "bench", "gpu", *arguments)
    while session.running and session.left > 0:
        session.look()


def rows(session: Session, wave: dict[str, Any]) -> None:
    """Some rows of a table, a number of them together, in the order in which they are named."""
    table, settings = wave["table"], [f"engine.device={session.device}", "engine.workers=1"]
    settings += wave.get("settings", [])
    folder = session.work / "runs" / Path(table).stem
    waiting: OrderedDict[str, Run] = OrderedDict()
    for pattern in wave["rows"]:
        job = find_table(table, [pattern], settings, 1, folder)
        waiting |= {row.name: Run(job.folders(row)[0]) for row in job.rows if row.name not in waiting}
    while (waiting or session.running) and session.left > 0:
        while waiting and len(session.running) < wave.get("together", 1):
            name, run = waiting.popitem(last=False)
            if not run.finished:
                arguments = ["reproduce", table, "--rows", name, "--out", str(folder), "--set", *settings]
                session.atoll(f"{Path(table).stem}-{name}", *arguments)
        session.look()


def unpack(previous: Path, work: Path) -> None:
    """What an earlier call left, beside what is here already: a run that is here stays as it is."""
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
            fresh = [one for one in members if one.name.startswith("runs/") or not (work / one.name).exists()]
            archive.extractall(work, fresh, filter="data")
    for run in map(Run, work.glob("runs/*/*")):
        if run.exists() and not run.finished and run.latest() is None:
            shutil.rmtree(run.folder)  # its checkpoint found no room: it begins again


def pack(session: Session, out: Path) -> None:
    """The results, and the checkpoints that fit beside them."""
    out.mkdir(parents=True, exist_ok=True)
    for old in (*out.glob("results.tar.gz"), *out.glob("checkpoints.tar.*")):
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
    room = (FILES - 1) * BYTES
    unfinished = [(one["share"], run) for one, run in zip(states, runs, strict=True) if not one["finished"]]
    with tempfile.TemporaryFile() as whole:
        with tarfile.open(fileobj=whole, mode="w") as archive:
            for _, run in sorted(unfinished, key=lambda pair: -pair[0]):
                kept = needed(run)
                size = sum(path.stat().st_size + 2048 for path in kept)
                if size > room:
                    say(f"{run.folder.name}: its checkpoint, {size / 2**20:.0f} MiB, found no room")
                    continue
                room -= size
                for path in kept:
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
    """The files that a run goes on from: its newest checkpoint, and what its clients keep."""
    newest = max(run.checkpoints.glob("round-*.safetensors"), default=None)
    clients = [path for path in (run.checkpoints / "clients").rglob("*") if path.is_file()]
    return [] if newest is None else [newest, *clients]


def state(run: Run) -> dict[str, Any]:
    """How far a run came, and its numbers."""
    of = tomllib.loads((run.folder / "recipe.toml").read_text())["train"]["rounds"]
    done = max((line["round"] for line in run.metrics()), default=0)
    results = {
        k: v for k, v in (run.read_json("evaluation.json") or {}).items() if isinstance(v, int | float)
    }
    return {
        "run": f"{run.folder.parent.name}/{run.folder.name}", "finished": run.finished, "round": done, "of": of,
        "share": done / max(of, 1), "results": results,
    }  # fmt: skip


def say(line: str) -> None:
    """A line for whoever waits."""
    print(line, flush=True)


def main() -> int:
    """Work until the time is over, and pack."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--previous", type=Path)
    options = parser.parse_args()
    told = os.environ.get
    work = Path(told("ATOLL_GPU_WORK") or tempfile.gettempdir() + "/atoll-gpu").resolve()
    work.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("ATOLL_CACHE", str(work.with_name(work.name + "-cache")))
    until = began + float(told("ATOLL_GPU_SECONDS", "560")) - PACKING
    session = Session(work, told("ATOLL_GPU_DEVICE", "cuda"), told("ATOLL_GPU_SCALE", "full"), until)
    plan = Path(told("ATOLL_GPU_PLAN", str(HERE / "plan.toml")))
    waves = tomllib.loads(plan.read_text())["rows"]
    if options.previous:
        unpack(options.previous, work)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        bench(session)
        for wave in waves:
            rows(session, wave)
    except KeyboardInterrupt:
        say("interrupted: what there is will be packed")
    session.stop()
    pack(session, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
