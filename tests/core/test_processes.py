"""How processes start."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch

from atoll.core.processes import process_context
from atoll.engines.worker_pool import WorkerPool

REPOSITORY = Path(__file__).parents[2]
forks = pytest.mark.skipif(sys.platform != "linux", reason="processes are forks on Linux only")


FROM_STDIN = """
from atoll.core.processes import process_context
process = process_context().Process(target=print, args=("it ran",), kwargs={"flush": True})
process.start()
process.join()
raise SystemExit(process.exitcode)
"""


def test_a_script_from_the_standard_input_can_start_processes():
    done = subprocess.run(
        [sys.executable, "-"], input=FROM_STDIN, capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "it ran\n", "")


FROM_A_FORK = """
import os
from atoll.core.processes import process_context
process_context()
if child := os.fork():
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
process = process_context().Process(target=print, args=("it ran",), kwargs={"flush": True})
process.start()
process.join()
os._exit(process.exitcode)
"""


@forks
def test_a_fork_of_a_process_with_a_fork_server_can_start_processes():
    """As in a pool of multiprocessing's, which forks by default, after a run with workers."""
    done = subprocess.run(
        [sys.executable, "-c", FROM_A_FORK], capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stdout) == (0, "it ran\n"), done.stderr


LOOK = """
import signal, sys
connection.send((set(sys.modules), signal.pthread_sigmask(signal.SIG_BLOCK, set())))
"""


@forks
def test_a_process_starts_with_everything_imported_and_interrupts_blocked():
    here, there = multiprocessing.Pipe()
    process = process_context().Process(target=exec, args=(LOOK, {"connection": there}))
    process.start()
    there.close()
    with closing(here):
        modules, blocked = here.recv()
    process.join()
    assert {"torch.optim", "atoll.engines.worker_pool"} <= modules
    assert {signal.SIGINT, signal.SIGHUP} <= blocked


FURTHER = """
import multiprocessing, sys
from atoll.core.processes import process_context

def look(connection):
    connection.send({"torch._dynamo", "torchvision"} & set(sys.modules))

if __name__ == "__main__":
    here, there = multiprocessing.Pipe()
    process_context(*sys.argv[1:]).Process(target=look, args=(there,)).start()
    print(*sorted(here.recv()))
"""


@forks
@pytest.mark.parametrize("modules", ["", "torch._dynamo", "torch._dynamo torchvision"])
def test_a_process_starts_with_the_further_modules_imported(modules, tmp_path):
    script = tmp_path / "further.py"
    script.write_text(FURTHER)
    done = subprocess.run([sys.executable, script, *modules.split()], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, modules + "\n"), done.stderr


IMPORTED_WITHOUT_GPU = """
import torch

def used(*arguments):
    raise SystemExit("the GPU is used, and a fork could not use it any more")

for name in dir(torch._C):
    if name.startswith("_cuda_") and not isinstance(getattr(torch._C, name), type):
        setattr(torch._C, name, used)
import atoll.engines.worker_pool, torchvision, torch._dynamo
"""


def test_what_the_fork_server_imports_uses_no_gpu():
    subprocess.run([sys.executable, "-c", IMPORTED_WITHOUT_GPU], check=True)


class Environment:
    """A recipe that fails to be unpickled, with the value of an environment variable."""

    own_training_code = ()

    def __reduce__(self):
        return exec, (
            "import os; from atoll.core.errors import UserError; raise UserError(os.environ['SET_LATER'])",
        )


def test_a_worker_has_the_environment_of_its_start(monkeypatch, tmp_path):
    process_context()
    monkeypatch.setenv("SET_LATER", "value of now")
    with closing(WorkerPool([torch.device("cpu")])) as pool:
        pool.assign(Environment(), tmp_path, times=None)
        with pytest.raises(Exception, match=r"^value of now$"):
            pool._pipes[0].receive()


TRAINS = """
import sys
from pathlib import Path
sys.path.insert(0, {repository!r})
from tests.harness import run_tiny
if __name__ == "__main__":
    run_tiny(Path(sys.argv[1]), "method.name=fedema", "train.rounds=2", "train.epochs=100000", "engine.workers=2")
"""


def processes_of(session):
    """Ids of the processes of a session, without those that have ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            status, _, _, of = path.read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(of) == session and status != "Z":
            found.append(int(path.parent.name))
    return found


@pytest.mark.slow
@forks
def test_nothing_survives_a_killed_run(tmp_path):
    """Workers end at their next step, and write no state."""
    script = tmp_path / "script.py"
    script.write_text(TRAINS.format(repository=str(REPOSITORY)))
    main = subprocess.Popen([sys.executable, str(script), str(tmp_path / "run")], start_new_session=True)
    try:
        # The main process, the resource tracker, the fork server and two workers.
        while len(processes_of(main.pid)) < 5 and main.poll() is None:
            time.sleep(0.1)
        time.sleep(5)  # so that they train
        assert main.poll() is None
        main.kill()
        main.wait()
        deadline = time.monotonic() + 30
        while processes_of(main.pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not processes_of(main.pid)
    finally:
        if processes_of(main.pid):
            os.killpg(main.pid, signal.SIGKILL)
    assert not list((tmp_path / "run/checkpoints").glob("clients/*/000001.safetensors"))
