import importlib.metadata
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
    code = f"{here['processor']}, {here['cpu']}, PyTorch {here['torch']}, oneDNN {here['onednn']}"
    assert in_words(here) == f"{code}, on cpu, 2 threads"


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


def test_another_makers_processor_is_a_difference_and_another_model_is_not():
    """An Intel Xeon and an AMD EPYC, both with AVX-512, train other weights."""
    here = {**environment(CPU, 1), "processor": "AMD EPYC"}
    assert difference(here, {**here, "processor": "AMD EPYC 9654 96-Core Processor"}) is None
    other = {**here, "processor": "Intel(R) Xeon(R) Processor"}
    expected = "processor = AMD EPYC, and here it is Intel(R) Xeon(R) Processor"
    assert difference(here, other) == expected
    before = {key: value for key, value in here.items() if key != "processor"}
    assert difference(before, here) is None


def incompatible():
    raise RuntimeError("cuDNN version incompatibility")


def test_the_version_of_cudnn_counts_on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    gpu = torch.device("cuda")
    here = environment(gpu, 1)
    assert "cuDNN 91002" in in_words(here)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91100)
    assert difference(here, environment(gpu, 1)) == "cudnn = 91002, and here it is 91100"
    before = {key: value for key, value in here.items() if key != "cudnn"}  # by an earlier version of Atoll
    assert difference(before, here) is None
    assert difference(before, {**here, "torch": "0"})
    assert "cudnn" not in environment(CPU, 1)
    assert difference(here, environment(CPU, 1)).startswith("device = a GPU")
    for version in (lambda: None, incompatible):  # None: a PyTorch without cuDNN
        monkeypatch.setattr(torch.backends.cudnn, "version", version)
        assert "cudnn" not in environment(gpu, 1)


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


IMPORTS = {
    "of a name": "from helping import twice",
    "of a module": "import helping; twice = helping.twice",
    "of a module by another name": "import helping as other; twice = other.twice",
}


@pytest.mark.parametrize("words", IMPORTS.values(), ids=IMPORTS.keys())
def test_what_a_function_imports_as_it_runs_is_its_code(described, words):
    code = f"def Mine(x):\n    def inner():\n        {words}\n        return twice(x)\n    return inner()\n"
    before = described(code)
    assert other_code(before, described(code)) is None
    assert other_code(before, described(code, HELPING.replace("2 *", "3 *"))) == "coding:Mine"


def test_of_a_name_that_is_imported_as_code_runs_what_lies_beside_it_does_not_count(described):
    code = "def Mine(x):\n    from helping import twice\n    return twice(x)\n"
    assert other_code(described(code), described(code, HELPING.replace("3", "4"))) is None


@pytest.mark.parametrize("helping", ["raise SystemExit(1)", "1 / 0", "import nothing_here", ""])
def test_an_import_that_fails_does_not_count(described, helping):
    code = "def Mine(x):\n    from helping import twice\n    import nothing_here\n    return twice(x)\n"
    assert described(code, helping)["code of coding:Mine"] != "unknown"
    assert other_code(described(code, helping), described(code, "")) is None


def test_relative_imports_are_followed_and_installed_modules_are_not_imported(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    installed = tmp_path / "installed"
    installed.mkdir()
    (installed / "heavy_library.py").write_text("")
    monkeypatch.syspath_prepend(installed)
    monkeypatch.setattr("atoll.core.fingerprint._INSTALLED", (str(installed),))
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "__init__.py").write_text("")
    (tmp_path / "packed" / "coding.py").write_text(
        "def Mine(x):\n    import heavy_library\n    from . import helping\n    from .more import add\n"
        "    return helping.twice(add(x))\n"
    )

    def describe(helping=HELPING, more="def add(x):\n    return x + 1\n"):
        for name, text in (("helping", helping), ("more", more)):
            (tmp_path / "packed" / f"{name}.py").write_text(text)
        for name in ("packed", "packed.coding", "packed.helping", "packed.more"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        return environment_of_code(["packed.coding:Mine"])

    before = describe()
    assert "heavy_library" not in sys.modules
    assert other_code(before, describe()) is None
    assert other_code(before, describe(HELPING.replace("2 *", "3 *"))) == "packed.coding:Mine"
    assert other_code(before, describe(more="def add(x):\n    return x + 2\n")) == "packed.coding:Mine"


@pytest.mark.parametrize(
    "edited",
    [{}, {"code": CODE.replace("a comment", "another")}, {"code": CODE.replace("return x", "return 1")}],
)
def test_comments_and_code_beside_it_do_not_make_other_code(described, edited):
    assert other_code(described(), described(**edited)) is None


@pytest.mark.parametrize("distribution", [True, False], ids=["metadata", "__version__"])
def test_another_version_of_an_installed_package_is_other_code(tmp_path, monkeypatch, distribution):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr("atoll.core.fingerprint._INSTALLED", (str(tmp_path),))

    def describe(version, body="pass"):
        lines = "" if distribution else f"__version__ = {version!r}\n"
        (tmp_path / "theirs.py").write_text(f"{lines}class Mine:\n    def loss(self, x): {body}\n")
        if distribution:
            about = tmp_path / "theirs_of_them.dist-info"
            about.mkdir(exist_ok=True)
            (about / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: theirs-of-them\nVersion: {version}\n"
            )
            (about / "top_level.txt").write_text("theirs\n")
        monkeypatch.delitem(sys.modules, "theirs", raising=False)
        return environment_of_code(["theirs:Mine"])

    before = describe("1.0")
    assert other_code(before, describe("1.1")) == "theirs:Mine"
    assert other_code(before, describe("1.0", "return x")) is None


def test_the_version_of_atoll_is_not_that_of_code(monkeypatch):
    before = environment_of_code(["atoll.methods.ssd:METHOD"])
    monkeypatch.setattr("atoll.core.environment._fingerprints", {})
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "another")
    assert other_code(before, environment_of_code(["atoll.methods.ssd:METHOD"])) is None


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
