"""How commands that train start."""

import subprocess
import sys

import pytest

STARTED = """
import sys
from atoll.core import processes

def process_context(*modules):
    sys.exit(f"started, and PyTorch is {'' if 'torch' in sys.modules else 'not '}imported")

processes.process_context = process_context
from atoll.cli.main import main
main()
"""


@pytest.mark.parametrize(
    "command", [["run", "digits-ssd"], ["compare", "digits-ssd"], ["demo"]], ids=" ".join
)
def test_what_workers_are_forks_of_starts_before_pytorch_is_imported(command, tmp_path):
    arguments = [*command, "--out", str(tmp_path / "run"), "--set", "engine.workers=2"]
    done = subprocess.run([sys.executable, "-c", STARTED, *arguments], capture_output=True, text=True)
    assert done.stderr == "started, and PyTorch is not imported\n"
