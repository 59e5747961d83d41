"""Flower's simulation, started by this process: on this machine, or on the machines of a Ray cluster.

Flower's own thread serves the nodes, and the rounds run in the thread of the caller, so that a signal stops them.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from flwr.serverapp import Grid, ServerApp

from atoll.core.errors import RunError, UserError
from atoll.core.imports import folders_of
from atoll.core.run_folder import Run
from atoll.core.tree import Tree
from atoll.engines.federation import Federation
from atoll.engines.flower.app_options import FlowerOptions
from atoll.engines.flower.engine import FlowerEngine
from atoll.engines.flower.executor import RemoteStates
from atoll.engines.rounds import RunContext, SiteResults
from atoll.engines.server import Server
from atoll.recipe.engine_options import EngineOptions
from atoll.recipe.recipe import Recipe

SECONDS_TO_START = 600.0
SECONDS_TO_CONNECT = 5.0
SECONDS_TO_ANSWER = 30.0  # limit for a machine, which first starts a process
SECONDS_OF_A_ROUND = 7 * 86_400.0  # in effect no limit, because Ray reports nodes that died
SENT = "ATOLL_", "PYTHONPATH", "FLWR_"  # prefixes of the environment variables that the nodes get


class FlowerSimulation:
    """Engine that trains each client on a node of Flower's simulation, and ends if one of them is lost.

    Use it in a ``with`` block; the simulation stops at the end of the block.

    Args:
        address: Address of a Ray cluster, ``HOST:PORT``, of which this machine is a part; empty to start Ray here.
    """

    at_sites = False

    def __init__(self, address: str = "") -> None:
        self._address = address
        self._stack = ExitStack()
        self._engine: FlowerEngine | None = None

    def __enter__(self) -> FlowerSimulation:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def gather(self, recipe: Recipe, folder: Path, restart: bool = False) -> Federation:
        """Build the federation, and start a node for each client.

        Raises:
            UserError: The recipe is invalid, or there is no Ray cluster at the address.
        """
        federation = Federation(recipe)
        states = folder / "checkpoints" / "nodes"
        code = folders_of(recipe.own_code)
        self._stack.enter_context(_ray(self._address, states.resolve(), code))
        clients = federation.setting.num_clients
        grid = self._stack.enter_context(_nodes(clients, recipe.engine))
        options = FlowerOptions(wait=SECONDS_TO_START, deadline=SECONDS_OF_A_ROUND)
        self._engine = FlowerEngine(grid, options, recipe.to_toml(), federation)
        return self._engine.gather(recipe, folder, restart)

    def states(self, store: Run) -> RemoteStates:
        """Return the record of the valid client states; the states themselves are at the nodes."""
        return self._started().states(store)

    def run(self, context: RunContext) -> Server:
        """Run all rounds; see `run_rounds`.

        Raises:
            NodeLostError: A client was lost.
        """
        return self._started().run(context)

    def measure(self, server: Server, final: bool) -> SiteResults:
        """Return nothing, because the nodes have the images of this machine."""
        return {}

    def _started(self) -> FlowerEngine:
        if self._engine is None:
            raise RuntimeError("gather was not called")
        return self._engine


@contextmanager
def _ray(address: str, states: Path, code: Sequence[str] = ()) -> Iterator[None]:
    """Connect to a Ray cluster, or start Ray here; Flower's simulation uses the connection, and ends it.

    Nodes read the recipe as a text, so the folders of its code, such as that of its file, are put on their path.
    """
    import ray

    if address:
        _reach(address)
    variables = {name: value for name, value in os.environ.items() if name.startswith(SENT)}
    if code:
        variables["PYTHONPATH"] = os.pathsep.join([*code, *filter(None, [variables.get("PYTHONPATH")])])
    on_stop = signal.getsignal(signal.SIGTERM)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of Ray, about itself
            ray.init(
                address=address or "local",
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                runtime_env={"env_vars": {"ATOLL_STATE": str(states), **variables}},
            )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise RunError(
            f"Ray did not start: {error}; --ray needs a machine that is part of the cluster"
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_stop)  # Ray's own would not let the caller clean up
    try:
        _wait_for_machines()
        yield
    finally:
        ray.shutdown()


def _reach(address: str) -> None:
    """Try to connect to an address first, because Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        raise UserError(f"--ray is {address!r}; give HOST:PORT, as `ray start --head` prints it")
    try:
        socket.create_connection((host, int(port)), SECONDS_TO_CONNECT).close()
    except (OSError, OverflowError) as error:
        raise UserError(
            f"there is no Ray cluster at --ray {address} ({error}); start one with `ray start --head`"
        ) from None


def _wait_for_machines() -> None:
    """Wait until each machine that Ray lists as alive answers; Ray lists a dead machine for up to a minute."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    @ray.remote(num_cpus=0)
    def answer() -> None:
        """Do nothing."""

    ends = time.monotonic() + SECONDS_TO_START
    while True:
        alive = [machine["NodeID"] for machine in _machines() if machine["Alive"]]
        asked = [
            answer.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()
            for node in alive
        ]
        try:
            ray.get(asked, timeout=SECONDS_TO_ANSWER)
            return
        except (ray.exceptions.RayError, TimeoutError):
            if time.monotonic() > ends:
                raise RunError(
                    f"a machine of the Ray cluster did not answer for {SECONDS_TO_START:g} s"
                ) from None


def _machines() -> list[Tree]:
    """Ray's information about each machine of the cluster."""
    import ray

    nodes: Callable[[], list[Tree]] = ray.nodes  # which has no types
    return nodes()


@contextmanager
def _nodes(count: int, options: EngineOptions) -> Iterator[Grid]:
    """Start a simulation with this number of nodes in a separate thread; stop it at the end."""
    from flwr.server.superlink.fleet.vce.backend.backend import BackendConfig
    from flwr.simulation import run_simulation

    from atoll.engines.flower.client_app import app

    grids: queue.Queue[Grid | BaseException] = queue.Queue()
    done = threading.Event()
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: object) -> None:
        grids.put(grid)
        done.wait()

    has_gpus = any(machine["Resources"].get("GPU") for machine in _machines())
    resources: BackendConfig = {
        "client_resources": {
            "num_cpus": float(options.threads),
            "num_gpus": float(options.of_a_node().device != "cpu" and has_gpus),
        }
    }

    def serve() -> None:
        try:
            run_simulation(server, app, count, backend_config=resources)
        except BaseException as error:
            grids.put(error)

    logging.getLogger("flwr").addFilter(_is_ours)
    thread = threading.Thread(target=serve, name="flower", daemon=True)
    thread.start()
    try:
        grid = grids.get(timeout=SECONDS_TO_START)
        if isinstance(grid, BaseException):
            raise RunError(f"Flower's simulation did not start: {grid.__cause__ or grid}") from grid
        yield grid
    finally:
        done.set()
        thread.join()


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether a line of Flower's log is a warning of Atoll's; the engine learns of nodes' errors in another way."""
    return record.levelno >= logging.WARNING and "atoll" in Path(record.pathname).parts
