"""Environment of a computation, on which the last bits of a result depend: the CPU, the libraries, the device."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path

import torch

from atoll.core.devices import device_kind

Environment = dict[str, str | int]

# Variables that choose the instructions of PyTorch's kernels, of oneDNN and of MKL.
VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_CBWR",
)
NOT_COMPARED = ("processor",)  # models of the same capability compute with the same instructions


def environment(device: torch.device, threads: int) -> Environment:
    """Describe the environment of a computation.

    Args:
        device: The device that computes.
        threads: Number of CPU threads of each process.

    Returns:
        ``cpu`` (PyTorch's CPU capability, such as ``"AVX512"``), ``machine``, ``processor``, ``torch``, ``onednn``,
        ``threads``, ``device``, and the environment variables that are set and choose instructions.
    """
    onednn = re.search(r"(?:MKL-DNN|oneDNN) v([\w.]+)", torch.__config__.show())
    return {
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "processor": _processor(),
        "torch": str(torch.__version__),
        "onednn": onednn.group(1) if onednn else "none",
        "threads": threads,
        "device": device_kind(device),
        **{name: os.environ[name] for name in VARIABLES if os.environ.get(name)},
    }


def difference(before: Mapping[str, object], now: Mapping[str, object]) -> str | None:
    """First difference of two environments that may change results, in words; None if there is none."""
    for key in dict.fromkeys([*before, *now]):
        if key not in NOT_COMPARED and before.get(key) != now.get(key):
            return f"{key} = {before.get(key, 'unset')}, and here it is {now.get(key, 'unset')}"
    return None


def in_words(found: Mapping[str, object]) -> str:
    """Describe an environment in one line, for a report."""
    names = {"cpu": "{}", "torch": "PyTorch {}", "onednn": "oneDNN {}", "device": "on {}"}
    words = [form.format(found[key]) for key, form in names.items() if key in found]
    threads = found.get("threads")
    return ", ".join([*words, f"{threads} thread{'s' * (threads != 1)}"] if threads else words)


def _processor() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found.group(1).strip() if found else platform.processor()
