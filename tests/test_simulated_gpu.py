"""Every method on a device that is not the CPU: same numbers, nothing on the wrong device, no waiting in a step.

Whole runs, on a device that is CUDA's by name.
"""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch.utils import backend_registration

from atoll.components.base import Trained
from atoll.engines.server import Server
from atoll.methods.registry import METHODS
from tests.steps import federation as make_federation
from tests.test_every_method import NEEDS

SMALL = (
    "data.limit=16", "partition.clients=2", "train.batch_size=8", "train.lr=0.01",
    "views.blur=0.5", "views.solarize=0.5", "views.mean=[0.5]", "views.std=[0.2]",
)  # fmt: skip
NEEDS_HERE = {**NEEDS, "multi_krum": (*NEEDS["multi_krum"], "partition.clients=4")}
PROCESSES = 2
pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this version of PyTorch has no devices that are written in Python",
)
# Once a round, a client loads what was sent and gives back what it made of it. That is not the step.
BETWEEN_STEPS = {"before", "start", "epoch", "finish", "after"}


def settings_of(name):
    return [*SMALL, *NEEDS_HERE.get(name, ())]


@pytest.fixture(scope="module")
def played():
    """What became of each method on the simulated device, by name."""
    names = ["evaluation", "cost", "bare", *sorted(METHODS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    programs = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.simulated_rounds", *names[first::PROCESSES]],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for first in range(PROCESSES)
    ]  # fmt: skip
    told = {}
    for program in programs:
        out, error = program.communicate()
        assert program.returncode == 0, error
        told.update({line["method"]: line for line in map(json.loads, out.splitlines())})
    return told


@pytest.mark.parametrize("name", sorted(METHODS))
def test_it_trains_on_another_device(name, played):
    told = played[name]
    assert "error" not in told, told["error"]
    assert told["steps"] > 0
    assert told["difference"] <= (
        1e-6 if name in ("fed_mae", "fed_mar", "dec_mar") else 0
    )  # attention has one kernel here, another there


@pytest.mark.parametrize("name", sorted(METHODS))
def test_the_host_never_waits_for_the_device_in_a_step(name, played):
    assert set(played[name]["notes"]) <= BETWEEN_STEPS, played[name]["notes"]


@pytest.mark.parametrize("name", sorted(METHODS))
def test_the_clients_images_are_on_the_device(name, played):
    assert played[name]["resident"]


@pytest.mark.parametrize("name", sorted(METHODS))
def test_nothing_random_is_drawn_on_the_device(name, played):
    assert not [note for notes in played[name]["notes"].values() for note in notes if "drawn" in note]


def test_an_encoder_is_evaluated_on_another_device(played):
    told = played["evaluation"]
    here, there = (dict(told[where]) for where in ("here", "there"))
    values = [
        [*one.pop("geometry/singular_values"), one.pop("geometry/effective_rank")] for one in (here, there)
    ]
    for one in (here, there):  # the times, and the device itself
        del one["seconds"], one["environments"]
    assert values[1] == pytest.approx(
        values[0], rel=1e-12, abs=1e-12
    )  # by another routine, without the vectors
    assert there == here
    assert {"knn/accuracy", "classifier/accuracy", "finetune-10/accuracy"} <= set(told["here"])
    for place in ("evaluation/knn.py", "evaluation/classifier.py", "evaluation/finetune.py"):
        assert any(place in note for note in told["notes"]), told["notes"]


def test_a_dry_run_checks_and_folds_an_update_of_the_device(played):
    assert played["cost"]["there"] == played["cost"]["here"]


def test_the_bare_loop_waits_no_more_than_a_federated_round(played):
    """Otherwise the overhead that the bench of a GPU measures would look smaller than it is."""
    assert played["bare"]["notes"] == {"_local_scalar_dense": 1}  # the loss, at the end


def test_the_device_is_strict(played):
    """It refuses what CUDA refuses, and notes what CUDA would wait for."""
    assert set(played) == {*METHODS, "evaluation", "cost", "bare"}
    program = "from tests.simulated_gpu import install, rules; install(); rules()"
    checked = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


@pytest.fixture(scope="module")
def on_cuda():
    """What `tests.simulated_cuda` tells."""
    program = subprocess.run(
        [sys.executable, "-m", "tests.simulated_cuda"],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert program.returncode == 0, program.stderr
    return json.loads(program.stdout.splitlines()[-1])


def test_images_are_embedded_and_searched_on_the_gpu_unless_the_cpu_is_named(on_cuda):
    here, *there, cpu = on_cuda["searched"]
    assert here["used"] == cpu["used"] == [["cpu", False, True]]  # any kernels, and PyTorch's TF32
    assert [one["used"] for one in there] == [[["cuda", True, False]]] * 2
    for one in (*there, cpu):
        assert one["restored"]
        names, h, device = one["embedded"]
        assert (names, device) == (here["embedded"][0], "cpu")
        assert torch.allclose(torch.tensor(h), torch.tensor(here["embedded"][1]), rtol=1e-5)
        assert one["found"] == here["found"]
        for values, expected in zip(one["numbers"], here["numbers"], strict=True):
            assert torch.allclose(torch.tensor(values), torch.tensor(expected))


def test_whole_runs_work_on_a_device_that_is_cudas(on_cuda):
    """With the branches of the code that are for CUDA alone: fused optimisers, a thread that trains, stacks."""
    told = on_cuda
    for name, (here, there) in told["runs"].items():
        assert here.keys() == there.keys(), name
        assert there["losses"] == pytest.approx(here["losses"], rel=1e-4), name
        assert there["knn/accuracy"] == pytest.approx(here["knn/accuracy"], abs=0.03), name
    here, there = told["given"]
    assert there == pytest.approx(here, rel=1e-4)
    assert told["repeats"]
    assert not told["tf32"]
    assert told["workers"] == ["cuda"]
    assert told["worker"] == "cuda"
    assert told["timed"] == 4  # both layouts, recorded, compiled
    assert told["streams"]["count"] > 4
    assert told["streams"]["reads"] > 0  # of the images, say, which all clients share
    assert told["streams"]["races"] == []


@pytest.mark.slow
def test_no_method_has_a_race_on_streams():
    """Clients that train at once on CUDA streams read nothing that another stream may still be writing."""
    settings = {name: [*settings_of(name), f"method.name={name}"] for name in sorted(METHODS)}
    program = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.simulated_cuda", json.dumps(settings)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert program.returncode == 0, program.stderr
    assert json.loads(program.stdout.splitlines()[-1]) == {name: [] for name in METHODS}


@pytest.mark.parametrize("name", sorted(METHODS))
def test_losses_are_in_float32_under_autocast(name):
    federation = make_federation(*settings_of(name), f"method.name={name}")
    setting, method = federation.setting, federation.recipe.composed
    start = federation.initial_weights()
    images = federation.splits.test.images
    trained = {needed: Trained(start, images) for needed in method.prerequisites()}
    server = Server(federation.recipe, setting, start, trained)
    client, data = federation.client_side(server.constants), federation.client_data(0)
    client.start(method.send(server.state, setting, 0, range(setting.num_clients), 2), None, data)
    made = set()
    for layer in client.networks.modules():
        if isinstance(layer, torch.nn.Conv2d | torch.nn.Linear):
            layer.register_forward_hook(lambda layer, given, out: made.add(out.dtype))
    batch = next(data.batches(2, 1, method.images))
    with torch.autocast("cpu", torch.bfloat16):
        loss = client.step(batch)
    assert made == {torch.bfloat16}
    losses = [values[-1] for values in client._losses.values()]
    assert len(losses) == 1 + len(method.losses)
    assert {value.dtype for value in (*losses, loss)} == {torch.float32}
    assert torch.isfinite(loss)
    loss.backward()
    client.optimizer.step()
    client.after_step()
    assert {weight.dtype for weight in client.networks.parameters()} == {torch.float32}
