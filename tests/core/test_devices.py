"""Names of devices, on a machine whose GPUs are made up."""

import os
import subprocess
import sys

import pytest
import torch
from torch.cuda._utils import _get_device_index
from torch.nn.attention import SDPBackend

from atoll.core.devices import find_device, find_devices, repeat_results, use_gpu
from atoll.core.errors import UserError
from atoll.core.process_state import settings_kept
from atoll.recipe.engine_options import EngineOptions


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs of one model and one of another."""
    models = ["H100", "H100", "L4"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(models))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(models))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: models[device.index or 0])
    return models


def test_auto_is_every_gpu_and_the_cpu_without_any(gpus):
    gpus.pop()
    assert list(map(str, find_devices("auto", "it"))) == ["cuda:0", "cuda:1"]
    gpus.clear()
    assert find_devices("auto", "it") == [torch.device("cpu")]


def test_devices_of_several_kinds_are_refused(gpus):
    for names in (["cuda:1", "cuda:2"], "auto"):
        with pytest.raises(
            UserError, match=r"it has devices of different kinds, cuda:1 \(H100.* and cuda:2 \(L4"
        ):
            find_devices(names, "it")
    with pytest.raises(UserError, match=r"cuda \(H100.* and cpu \(cpu\)"):
        find_devices(["cuda", "cpu"], "it")


def test_a_gpu_that_is_not_there_is_refused(gpus):
    assert find_device("cuda:2", "it") == torch.device("cuda:2")
    with pytest.raises(UserError, match="it is cuda:3, and PyTorch finds cuda:0, cuda:1, cuda:2; use one of"):
        find_device("cuda:3", "it")
    gpus.clear()
    with pytest.raises(UserError, match="finds no GPU"):
        find_devices(["cuda:0"], "it")


def test_a_gpu_without_a_number_stays_the_current_one(monkeypatch):
    """PyTorch refuses to set it; the recipe's "auto" and "cuda" name no number."""
    used = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: used.append(_get_device_index(device)))
    with pytest.raises(ValueError, match="specified index"):
        torch.cuda.set_device(torch.device("cuda"))
    for name in ("cpu", "cuda", "cuda:1"):
        use_gpu(torch.device(name))
    assert used == [1]


def on(workers, devices, cohort=10):
    return list(map(str, EngineOptions(workers=workers, devices=devices).worker_devices(cohort)))


def test_workers_are_spread_over_the_devices_in_turn(gpus):
    two = ("cuda:0", "cuda:1")
    assert on(1, two) == list(two)
    assert on(3, two) == ["cuda:0", "cuda:1", "cuda:0"]
    assert on(3, two, cohort=1) == ["cuda:0"]
    assert on(2, ()) == ["cuda", "cuda"]


def test_workers_take_no_more_cores_than_the_process_may_use(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {1, 4, 5}, raising=False)
    assert len(EngineOptions(device="cpu", workers=0).worker_devices(10)) == 3
    assert len(EngineOptions(device="cpu", workers=0, threads=2).worker_devices(10)) == 1


def test_channels_last_is_for_gpus_unless_the_recipe_says_otherwise(gpus):
    assert EngineOptions().uses_channels_last() is True
    for chosen in ("auto", True, False):
        assert EngineOptions(stack=2, channels_last=chosen).uses_channels_last() is False
        on_cpu = EngineOptions(stack=2, channels_last=chosen, device="cpu")
        assert on_cpu.uses_channels_last() is (chosen is True)
    assert EngineOptions(device="cpu").uses_channels_last() is False
    for chosen in (True, False):
        assert EngineOptions(channels_last=chosen).uses_channels_last() is chosen
    gpus.clear()
    assert EngineOptions().uses_channels_last() is False


def test_the_first_device_is_that_of_the_evaluation_and_a_site_has_one(gpus):
    options = EngineOptions(devices=("cuda:1", "cuda:0"))
    assert options.find_device() == torch.device("cuda:1")
    assert options.on("cpu").find_devices() == [torch.device("cpu")]


@pytest.mark.parametrize(
    ("options", "device"),
    [
        ({"devices": ("cuda:1", "cuda:0")}, "cuda"),
        ({"devices": ("cpu", "cpu:0")}, "cpu"),
        ({"devices": "auto"}, "auto"),
        ({"device": "cuda:1"}, "cuda:1"),
    ],
)
def test_a_node_uses_its_own_device_of_the_kind_that_the_recipe_names(options, device):
    there = EngineOptions(**options).of_a_node()
    assert (there.device, there.devices) == (device, ())


def test_results_repeat_on_a_gpu_until_the_settings_are_restored(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)  # as scripts for GPUs often set it
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)  # as PyTorch does
    q, plain = torch.zeros(1, 2, 4, 8), int(SDPBackend.MATH)
    fused = torch._fused_sdp_choice(q, q, q)
    assert fused != plain
    with settings_kept():
        repeat_results(torch.device("cpu"))
        assert not torch.are_deterministic_algorithms_enabled()
        assert torch.backends.cudnn.allow_tf32
        assert torch._fused_sdp_choice(q, q, q) == fused
        repeat_results(torch.device("cuda:1"))
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert not torch.backends.cudnn.benchmark
        assert not torch.backends.cudnn.allow_tf32
        assert torch._fused_sdp_choice(q, q, q) == plain
        assert not torch.backends.cuda.mem_efficient_sdp_enabled()  # which CPUs have not
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        repeat_results(torch.device("cuda:1"), wanted=False)
        assert not torch.are_deterministic_algorithms_enabled()
        assert torch._fused_sdp_choice(q, q, q) == fused
        repeat_results(torch.device("cuda:1"))
    assert torch._fused_sdp_choice(q, q, q) == fused
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.backends.cudnn.benchmark
    assert torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize("before", [True, False])
def test_convolutions_are_in_float32_with_any_kernels_too(monkeypatch, before):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", before)
    with settings_kept():
        repeat_results(torch.device("cuda"), wanted=False)
        assert not torch.backends.cudnn.allow_tf32
    assert torch.backends.cudnn.allow_tf32 is before


@pytest.mark.skipif(not hasattr(torch.backends.cudnn, "conv"), reason="an older PyTorch")
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_a_precision_that_is_set_for_convolutions_alone_is_restored(precision):
    """PyTorch then refuses to say whether TF32 is allowed at all."""
    convolutions = torch.backends.cudnn.conv
    before = convolutions.fp32_precision
    convolutions.fp32_precision = precision
    try:
        with settings_kept():
            repeat_results(torch.device("cuda"))
            assert convolutions.fp32_precision != "tf32"
        assert convolutions.fp32_precision == precision
    finally:
        convolutions.fp32_precision = before


def test_the_choice_of_kernels_imports_no_compiler():
    """Which would take seconds in each process that trains on a GPU."""
    program = """
import sys, torch
from atoll.core.devices import repeat_results
from atoll.core.process_state import settings_kept
with settings_kept():
    repeat_results(torch.device("cuda"))
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
