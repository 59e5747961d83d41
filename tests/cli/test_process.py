import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.cli.process import Stopped, accept_any_text, signals_as_interrupts, start_forking


@pytest.mark.parametrize(
    ("encoding", "written"),
    [
        ("utf-8", "loss −2.3 ± 0.1 … ? κ"),
        ("cp1252", "loss -2.3 ± 0.1 … ? ?"),
        ("ascii", "loss -2.3 ? 0.1 . ? ?"),
    ],
)
def test_a_number_keeps_its_sign_in_any_encoding(monkeypatch, encoding, written):
    output = io.TextIOWrapper(io.BytesIO(), encoding)
    monkeypatch.setattr(sys, "stdout", output)
    accept_any_text()
    print("loss −2.3 ± 0.1 … \udce4 κ", end="", flush=True)
    assert output.buffer.getvalue().decode(encoding) == written


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_stops_the_block(name):
    number = getattr(signal, name)
    before = signal.signal(number, signal.SIG_DFL)  # a background job of a shell ignores some of them
    try:
        with pytest.raises(Stopped, match=name) as stopped, signals_as_interrupts():
            signal.raise_signal(number)
        assert stopped.value.exit_code == 128 + number
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_an_ignored_signal_stays_ignored():
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_as_interrupts():
            signal.raise_signal(signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("settings", "starts"),
    [
        ([], False),
        (["engine.workers=1"], False),
        (["engine.workers=auto"], False),
        (["engine.stack=4"], False),
        (["engine.workers=0"], True),
        (["engine.decoders=2"], True),
        (['engine.devices="auto"'], True),
    ],
)
def test_only_runs_with_more_processes_start_one(settings, starts, monkeypatch):
    started = []
    monkeypatch.setattr("atoll.core.processes.process_context", lambda *_: started.append(True))
    start_forking("board-short", settings)
    assert bool(started) == starts


@pytest.mark.parametrize(
    ("settings", "modules"),
    [
        ((), ()),
        (["data.source=torchvision", "data.path=CIFAR10"], ("torchvision",)),
        (["shift.kinds=['rotation']"], ("torchvision",)),
        (["model.encoder=timm:resnet18"], ("torchvision",)),
        (["model.encoder=torchvision.models:resnet18"], ("torchvision",)),
        (["model.encoder=hf:resnet"], ("torchvision",)),
        (["train.checkpoint_gradients=true"], ("torch._dynamo",)),
        (["model.lora_rank=2"], ("torchvision",)),
        (["model.encoder=mine:net"], ()),
        (["train.compile=true", "shift.kinds=['rotation']"], ("torchvision", "torch._dynamo")),
    ],
)
def test_workers_are_forks_of_what_has_imported_the_recipes_libraries(settings, modules, monkeypatch):
    started = []
    monkeypatch.setattr("atoll.core.processes.process_context", lambda *names: started.append(names))
    start_forking("digits-simclr", [*settings, "engine.workers=2"])
    assert started == [modules]


COMMAND = """
import gc, sys
from atoll.cli.main import main

sys.argv = ["atoll", *sys.argv[1:]]
main({})
print(gc.isenabled(), gc.get_freeze_count() > 100_000)
"""


def command(code, *arguments):
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    return done.stdout.splitlines(), done.stderr.splitlines()


def test_a_command_leaves_its_imports_out_of_garbage_collection(tmp_path):
    """Extension modules that find objects uncollected at the end would say so on the standard error."""
    arguments = ["report", str(tmp_path / "none")]
    lines, errors = command(COMMAND.format(""), *arguments)
    assert lines == ["True True"]
    assert [error.endswith("give a run's folder") for error in errors] == [True]
    assert command(COMMAND.format(arguments)) == (["True False"], errors)  # a program's own objects stay in


INTERRUPTED = """
import importlib.abc, signal, sys

class Interrupt(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == module:
            sys.meta_path.remove(self)
            signal.raise_signal(signal.SIGINT)

module = sys.argv.pop(1)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupt())
from atoll.cli.main import main
sys.exit(main())
"""


@pytest.mark.parametrize("module", ["numpy.lib", "torch.nn"])
def test_an_interrupted_import_ends_the_command(module):
    """PyTorch swallowed it while it imported NumPy, and the command went on with half of NumPy."""
    settings = ["--set", "data.source=folder", "data.path=none"]
    assert command(INTERRUPTED, module, "data", "digits", *settings) == ([], ["atoll: interrupted"])


@pytest.mark.parametrize("modules", ["atoll.engines.preload, triton", "triton, atoll.engines.preload"])
def test_an_extension_module_finds_its_objects_collected(modules):
    """It says so on the standard error if they were not; PyTorch's compiler imports it."""
    pytest.importorskip("triton")
    assert command(f"import {modules}") == ([], [])


@pytest.mark.parametrize(
    "words", [["federate", "audit", "none"], ["run", "digits", "--ray", "here"], ["schema"]], ids=" ".join
)
def test_what_computes_nothing_does_not_import_what_does(words):
    lines, _ = command(COMMAND.format(""), *words)
    assert lines[-1] == "True False"


def test_a_reader_may_end_before_the_output():
    command = [sys.executable, "-m", "atoll.cli.main", "egress", "digits-ssd", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


@pytest.mark.parametrize(
    ("arguments", "shown"), [(["presets"], "?"), (["run", "--help"], "engine.workers=2")]
)
def test_an_output_that_lacks_a_character_shows_another(arguments, shown):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}  # cp1252 in a file on Windows lacks some, too
    command = [sys.executable, "-m", "atoll.cli.main", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert shown in done.stdout
    assert done.stdout.isascii()
    assert done.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "arguments", [["presets"], ["methods", "--json"], ["--help"], ["run", "--help"], ["--version"]]
)
def test_an_output_on_a_full_disk_is_one_sentence(arguments, unbuffered):
    command = [sys.executable, "-m", "atoll.cli.main", *arguments]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment)
    assert done.returncode == 2
    assert done.stderr.startswith("atoll: the disk is full")
    assert done.stderr.count("\n") == 1


def test_a_closed_output_stops_no_command():
    command = [sys.executable, "-m", "atoll.cli.main", "presets"]
    done = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *command], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")
