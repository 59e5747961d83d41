"""Processes that share a GPU by default; the GPU is not there."""

import os
from types import SimpleNamespace

import pytest
import torch

from atoll.core import processes
from atoll.engines.federation import Federation
from atoll.engines.worker_devices import worker_devices
from atoll.recipe.engine_options import EngineOptions
from tests.harness import tiny

GPU = torch.device("cuda")


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A GPU of 80 GiB in a machine of six cores, and a command that asks for it."""
    machine = {"memory": 80 * 2**30, "mode": "Default", "command": True, "device": GPU}

    def devices(*settings):
        federation = Federation(tiny("engine.workers=auto", "partition.clients=8", *settings))
        federation.device = machine["device"]
        properties = SimpleNamespace(total_memory=machine["memory"])
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\necho {machine['mode']}\n")
        program.chmod(0o755)
        with monkeypatch.context() as changed:
            changed.setattr(torch.cuda, "get_device_properties", lambda _: properties)
            changed.setattr(EngineOptions, "find_devices", lambda _: [federation.device])
            changed.setattr(processes, "num_cores", lambda: 6)
            changed.setattr(processes, "in_command", machine["command"])
            changed.setenv("PATH", str(tmp_path), prepend=os.pathsep)
            return worker_devices(federation)

    machine["devices"] = devices
    return machine


def test_small_networks_share_a_gpu(gpu):
    assert gpu["devices"]() == [GPU] * 6
    assert gpu["devices"]("engine.threads=2") == [GPU] * 3
    assert gpu["devices"]("train.participation=0.25") == [GPU] * 2
    assert gpu["devices"]("train.participation=0.1") == [GPU]


def test_a_small_gpu_is_shared_by_fewer(gpu):
    gpu["memory"] = 8 * 2**30
    assert gpu["devices"]() == [GPU] * 2


@pytest.mark.parametrize(
    "settings",
    [
        ("engine.workers=1",),
        ("engine.streams=2",),
        ("engine.stack=2",),
        ("engine.decoders=1",),
        ("engine.devices=['cpu']",),
        ("train.batch_size=20000", "data.image_size=8"),
        ("model.width=", "model.encoder=resnet18"),
        ("model.encoder=tests.engines.test_client_weights:Counting", "model.width=", "model.stem=",
         "data.channels=1", "views.mean=[0.5]", "views.std=[0.5]"),
    ],
)  # fmt: skip
def test_large_networks_and_own_code_train_in_one_process(settings, gpu):
    assert gpu["devices"](*settings) == [GPU]


@pytest.mark.parametrize(
    "change", [{"command": False}, {"mode": "Exclusive_Process"}, {"device": torch.device("cpu")}]
)
def test_programs_exclusive_gpus_and_cpus_have_one_process(change, gpu):
    gpu.update(change)
    assert gpu["devices"]() == [gpu["device"]]
