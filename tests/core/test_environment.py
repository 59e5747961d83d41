import json
import os
import subprocess
import sys

import pytest
import torch

from atoll.core.environment import difference, environment, in_words

CPU = torch.device("cpu")


def test_the_environment_names_what_torch_says():
    here = environment(CPU, 2)
    assert here["cpu"] == torch.backends.cpu.get_cpu_capability()
    assert here["torch"] == torch.__version__
    assert (here["threads"], here["device"]) == (2, "cpu")
    assert str(here["onednn"]) in torch.__config__.show()
    assert (
        in_words(here)
        == f"{here['cpu']}, PyTorch {here['torch']}, oneDNN {here['onednn']}, on cpu, 2 threads"
    )


@pytest.mark.parametrize("variable", ["ATEN_CPU_CAPABILITY=default", "ONEDNN_MAX_CPU_ISA=SSE41"])
def test_other_instructions_are_a_difference(variable):
    name, _, value = variable.partition("=")
    program = (
        "import json, torch; from atoll.core.environment import environment;"
        "print(json.dumps(environment(torch.device('cpu'), 1)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, name: value},
    )
    other = json.loads(done.stdout)
    assert difference(environment(CPU, 1), other)
    assert difference(other, {**other, "processor": "another model"}) is None
