"""Worker processes when something happens to them."""

import os
import signal
import subprocess
import sys
from contextlib import closing

import pytest

from atoll.core.errors import RunError
from atoll.engines.executors import WorkerPool
from atoll.engines.federation import Federation
from atoll.engines.server import Server
from tests.harness import TINY, tiny


def test_a_worker_outlives_ctrl_c_and_its_death_is_a_sentence(tmp_path):
    federation = Federation(tiny())
    server = Server(federation.recipe, federation.setting, federation.initial_weights())
    with closing(WorkerPool(federation.recipe, tmp_path, 1)) as pool:
        (worker,) = pool._processes
        os.kill(worker.pid, signal.SIGINT)  # as a terminal does, and while the worker is still importing
        pool.start(server.constants)
        assert server.run_round(pool).clients == 4
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(RunError, match=r"a worker process died .*; resume the run"):
            server.run_round(pool)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.parametrize("module", ["atoll.engines.executors", "atoll.commands.run"])
def test_a_worker_and_a_run_import_no_more_than_they_need(module):
    """Scikit-learn takes as long as PyTorch where pandas is installed, and each worker and each site starts so."""
    heavy = {"sklearn", "pandas", "matplotlib", "scipy.stats"}
    code = f"import sys, {module}; print(*({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


@pytest.mark.slow
def test_a_script_without_a_guard_is_told(tmp_path):
    settings = [*TINY, "engine.workers=2", "train.rounds=1"]
    script = tmp_path / "script.py"
    script.write_text(
        f"import atoll\nrecipe = atoll.load_recipe('digits', {settings!r})\n"
        f"atoll.simulate(recipe, {str(tmp_path / 'run')!r})\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=os.environ)
    assert done.returncode == 1
    assert "put its code under if __name__ == '__main__':" in done.stderr
