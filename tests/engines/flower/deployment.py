"""A SuperLink and SuperNodes as separate processes on loopback, with TLS and node authentication."""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

from PIL import Image
from sklearn.datasets import load_digits

from atoll.core.run_folder import Run
from atoll.recipe.recipe import Recipe

EXAMPLES = Path(__file__).parents[3] / "examples" / "deployment"
BIN = Path(sys.executable).parent
SITES = ("east", "north", "south", "west")


class Deployment:
    """Starts and ends processes; everything lies in one folder, and nothing outlives `close`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = _free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "flwr").mkdir(parents=True)
        self.environment = {
            **os.environ,
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "FLWR_HOME": str(folder / "flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "ATOLL_CACHE": str(folder / "cache"),
        }
        keys = [*SITES, "stranger", "twin"]
        subprocess.run([sys.executable, EXAMPLES / "make_keys.py", folder / "keys", *keys], check=True)
        (folder / "flwr" / "config.toml").write_text(
            f'[superlink]\ndefault = "trial"\n[superlink.trial]\naddress = "127.0.0.1:{self.port}"\n'
            f'root-certificates = "{folder / "keys" / "ca.crt"}"\n'
        )

    def start_superlink(self) -> None:
        keys = self.folder / "keys"
        self._start(
            "superlink", "flower-superlink", "--host", "127.0.0.1", "--port", str(self.port),
            "--database", str(self.folder / "superlink.db"), "--ssl-ca-certfile", str(keys / "ca.crt"),
            "--ssl-certfile", str(keys / "server.crt"), "--ssl-keyfile", str(keys / "server.key"),
            "--enable-supernode-auth", "--disable-runtime-dependency-installation",
        )  # fmt: skip
        self.wait_for(lambda: _listens(self.port), 60, "the SuperLink")

    def register(self, *sites: str) -> None:
        for site in sites:
            self.flwr("supernode", "register", str(self.folder / "keys" / f"{site}.pub"))

    def start_node(
        self,
        site: str,
        key: str = "",
        name: str = "",
        ca: str = "",
        supervise: bool = False,
        credentials: tuple[str, ...] | None = None,
        **config: str,
    ) -> None:
        """Start a node; ``supervise``: as systemd does, again and again; ``credentials``: in place of CA and key.

        A SuperLink that has not yet missed a killed node's heartbeat (a minute) refuses that node, which then ends.
        """
        name = name or site
        given = {
            "site": site,
            "data": str(self.folder / "images" / site),
            "source": "folder",
            "state": str(self.folder / "state" / name),
            **config,
        }
        if credentials is None:
            credentials = (
                "--root-certificates", ca or str(self.folder / "keys" / "ca.crt"),
                "--auth-supernode-private-key", str(self.folder / "keys" / (key or site)),
            )  # fmt: skip
        self._start(
            name, "flower-supernode", "--superlink", f"127.0.0.1:{self.port}", *credentials,
            "--port", str(_free_port()), "--max-retries", "3",
            "--node-config", " ".join(f'{k}="{v}"' for k, v in given.items()), supervise=supervise,
        )  # fmt: skip

    def app(self, recipe: Recipe, sites: int = 4, name: str = "run", **options: float | str) -> Path:
        from atoll.engines.flower.app_template import write_app

        folder = self.folder / f"app-{name}"
        write_app(folder, recipe, sites, self.folder / name)
        text = (folder / "pyproject.toml").read_text()
        for key, value in options.items():
            line = next(line for line in text.splitlines() if line.startswith(f"{key} = "))
            text = text.replace(line, f"{key} = {value!r}")
        (folder / "pyproject.toml").write_text(text)
        return folder

    def run(self, app: Path) -> None:
        """Begin the run; see `finish`."""
        self.flwr("run", str(app))

    def flwr(self, *arguments: str) -> str:
        done = subprocess.run(
            [BIN / "flwr", *arguments], env=self.environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def finish(self, seconds: float = 1200, name: str = "run") -> Run:
        run = Run(self.folder / name)
        self.wait_for(lambda: (run.folder / "report.html").is_file(), seconds, "the run's end")
        return run

    def round(self) -> int:
        """The newest complete round; -1 before the run."""
        return max((line["round"] for line in Run(self.folder / "run").metrics), default=-1)

    def wait_for(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        ends = time.monotonic() + seconds
        while not condition():
            said = self.server_log()
            assert "raised an exception" not in said, said[-3000:]
            assert time.monotonic() < ends, (
                f"{what} did not come; {self.log('superlink')[-3000:]}{said[-3000:]}"
            )
            time.sleep(0.2)

    def server_log(self) -> str:
        """What the ServerApp printed, from the SuperLink's database."""
        if not (self.folder / "superlink.db").is_file():
            return ""
        with closing(sqlite3.connect(self.folder / "superlink.db")) as database:
            try:
                return "".join(text for (text,) in database.execute("select log from task_logs"))
            except sqlite3.OperationalError:  # not created yet, or locked
                return ""

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def kill(self, name: str) -> None:
        """As a power cut would: the process and all that it started."""
        process = self.processes.pop(name)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def kill_server_app(self) -> None:
        """The coordinator's process alone, which the SuperLink started."""
        found = subprocess.run(
            ["pgrep", "-f", f"flwr-serverapp .*:{self.port} "], capture_output=True, text=True
        )
        pids = [int(pid) for pid in found.stdout.split()]
        assert pids, "no ServerApp is running"
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        for name in list(self.processes):
            self.kill(name)

    def _start(self, name: str, *command: str, supervise: bool = False) -> None:
        arguments = [str(BIN / command[0]), *command[1:]]
        if supervise:
            arguments = ["bash", "-c", 'while true; do "$@"; sleep 5; done', "bash", *arguments]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                arguments, env=self.environment, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip


def write_digits(folder: Path, each: int = 40, held: int = 20) -> None:
    """Real digits as sites' folders: SITE/train/CLASS/*.png and SITE/test/CLASS/*.png."""
    digits, row = load_digits(), 0
    for site in SITES:
        for split, count in (("train", each), ("test", held)):
            for _ in range(count):
                place = folder / site / split / str(digits.target[row])
                place.mkdir(parents=True, exist_ok=True)
                pixels = (digits.images[row] * (255 / 16)).astype("uint8")
                Image.fromarray(pixels).save(place / f"{row:05d}.png")
                row += 1


def one_folder(folder: Path, sites: Path) -> Path:
    """The same images as our engine reads them: SPLIT/SITE/CLASS/*.png."""
    for site in SITES:
        for split in ("train", "test"):
            (folder / split).mkdir(parents=True, exist_ok=True)
            (folder / split / site).symlink_to(sites / site / split)
    return folder


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
