import json
import os
import subprocess
import sys

import pytest
import torch

from atoll.core.environment import difference, environment, environment_of_code, in_words, other_code

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


CODE = """
import helping
from helping import LIMIT

def clip(x):
    return min(x, LIMIT)

class Mine:
    def loss(self, x):  # a comment
        return helping.twice(clip(x))

class Other:
    def loss(self, x):
        return x
"""
HELPING = "LIMIT = 3\n\ndef twice(x):\n    return 2 * x\n"


@pytest.fixture
def described(tmp_path, monkeypatch):
    """What the environment says of ``coding:Mine``, with its module as it is or edited."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # edits of one second look alike to Python

    def describe(code=CODE, helping=HELPING):
        for name, text in (("coding", code), ("helping", helping)):
            (tmp_path / f"{name}.py").write_text(text)
            monkeypatch.delitem(sys.modules, name, raising=False)
        return environment_of_code(["coding:Mine"])

    return describe


@pytest.mark.parametrize(
    "edited",
    [
        {"code": CODE.replace("twice(clip(x))", "twice(x)")},
        {"code": CODE.replace("min(x", "max(x")},
        {"helping": HELPING.replace("3", "4")},
        {"helping": HELPING.replace("2 *", "3 *")},
    ],
)
def test_code_that_changed_or_uses_what_changed_is_other_code(described, edited):
    assert other_code(described(), described(**edited)) == "coding:Mine"


@pytest.mark.parametrize(
    "edited",
    [{}, {"code": CODE.replace("a comment", "another")}, {"code": CODE.replace("return x", "return 1")}],
)
def test_comments_and_code_beside_it_do_not_make_other_code(described, edited):
    assert other_code(described(), described(**edited)) is None


def test_what_cannot_be_compared_is_not_other_code(described):
    here = described()
    assert environment_of_code([]) == {}
    assert other_code({}, here) is None  # a run of an earlier version
    there = {**here, "code of coding:Mine": "0"}
    assert other_code(there, here) == "coding:Mine"
    assert other_code({**there, "python": "2.7"}, here) is None
    assert difference(there, here) is None
    assert in_words(here).startswith("code of coding:Mine ")


def test_code_whose_objects_cannot_be_read_is_not_compared(described):
    shy = "class Shy:\n    __slots__ = ()\n    def __repr__(self): raise RuntimeError\n"
    one, other = (
        described(f"{shy}SHY = Shy()\nclass Mine:\n    def loss(self): return SHY, {n}\n") for n in (1, 2)
    )
    assert one["code of coding:Mine"] == "unknown"
    assert other_code(one, other) is None


def test_the_weights_that_a_module_draws_at_its_import_are_not_its_code(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "drawn.py").write_text("import torch\nNET = torch.nn.Linear(2, 2)\n")
    first = environment_of_code(["drawn:NET"])
    monkeypatch.delitem(sys.modules, "drawn")
    assert other_code(first, environment_of_code(["drawn:NET"])) is None
