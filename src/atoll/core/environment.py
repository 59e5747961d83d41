"""Environment of a computation, on which its result depends: CPU, libraries, device, and the user's code."""

from __future__ import annotations

import contextlib
import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from atoll.core.devices import device_kind
from atoll.core.fingerprint import fingerprint, installed_version
from atoll.core.imports import import_attribute

Environment = dict[str, str | int]

# Variables that choose the instructions of PyTorch's kernels, of oneDNN and of MKL.
VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_CBWR",
)
NOT_COMPARED = ("python",)  # see `other_code`
LATER = ("cudnn", "processor")  # not recorded by earlier versions of Atoll, whose runs can be resumed
CODE = "code of "  # comes before a name, module:attribute
PYTHON = ".".join(platform.python_version_tuple()[:2])  # on which fingerprints of code depend
UNKNOWN = "unknown"  # replaces a fingerprint that cannot be computed
# Fingerprints of code at its import; the code may change global values when it runs.
_fingerprints: dict[str, tuple[Any, str]] = {}


def environment(device: torch.device, threads: int) -> Environment:
    """Describe the environment of a computation.

    Args:
        device: The device that computes.
        threads: Number of CPU threads of each process.

    Returns:
        ``cpu`` (PyTorch's CPU capability, such as ``"AVX512"``), ``machine``, ``processor``, ``torch``, ``onednn``,
        ``threads``, ``device``, on a GPU ``cudnn`` (its version as PyTorch's number), and the environment variables
        that are set and choose instructions.
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
        **_cudnn(device),
        **{name: os.environ[name] for name in VARIABLES if os.environ.get(name)},
    }


def environment_of_code(names: Sequence[str]) -> Environment:
    """Describe the user's code that a recipe names: its fingerprints, and the Python version on which they depend.

    Code in an installed package is identified by its names and the package's version.

    Args:
        names: Names, ``module:attribute``, which are imported.

    Returns:
        ``python`` and ``code of NAME`` for each name; nothing without names.

    Raises:
        UserError: A name cannot be imported.
    """
    found: Environment = {"python": PYTHON} if names else {}
    for name in names:
        value = import_attribute(name, "the recipe's code")
        if name not in _fingerprints or _fingerprints[name][0] is not value:
            _fingerprints[name] = (value, _fingerprint_of_code(name, value))
        found[CODE + name] = _fingerprints[name][1]
    return found


def _fingerprint_of_code(name: str, value: Any) -> str:
    # A module's weights may be drawn when it is imported, and the run has a copy of them.
    own = type(value) if isinstance(value, nn.Module) else value
    try:
        # Code of an installed package is identified by its names, which an upgrade may keep.
        version = installed_version(name.partition(":")[0])
        return fingerprint([own, version] if version else own, versions=False)
    except Exception:  # the user's objects may be unreadable, or contain each other endlessly
        return UNKNOWN


def other_code(before: Mapping[str, object], now: Mapping[str, object]) -> str | None:
    """Return the first name whose code differs between two environments, or None.

    Code cannot be compared if another Python version compiled it, or if an earlier version of Atoll did not record
    it.
    """
    if before.get("python") != now.get("python"):
        return None
    changed = (
        key
        for key in now
        if key.startswith(CODE) and len({now[key], before.get(key, now[key])} - {UNKNOWN}) > 1
    )
    return next((key.removeprefix(CODE) for key in changed), None)


def difference(before: Mapping[str, object], now: Mapping[str, object]) -> str | None:
    """Describe the first difference of two environments that may change results; None if there is none.

    The user's code is compared by `other_code`.
    """
    for key in dict.fromkeys([*before, *now]):
        compared = key not in NOT_COMPARED and not key.startswith(CODE)
        unknown = key in LATER and not (key in before and key in now)
        if compared and not unknown and _instructions(key, before) != _instructions(key, now):
            return f"{key} = {before.get(key, 'unset')}, and here it is {now.get(key, 'unset')}"
    return None


def _instructions(key: str, found: Mapping[str, object]) -> object:
    """What chooses instructions: a value, but of a processor's model its maker.

    MKL has other code for each maker's processors, even if their capability is the same.
    """
    value = found.get(key)
    return str(value).partition(" ")[0] if key == "processor" else value


def in_words(found: Mapping[str, object]) -> str:
    """Describe an environment in one line, for a report."""
    names = {
        "processor": "{}",
        "cpu": "{}",
        "torch": "PyTorch {}",
        "onednn": "oneDNN {}",
        "device": "on {}",
        "cudnn": "cuDNN {}",
    }
    words = [form.format(found[key]) for key, form in names.items() if found.get(key)]
    threads = found.get("threads")
    words += [f"{threads} thread{'s' * (threads != 1)}"] if threads else []
    return ", ".join([*words, *(f"{key} {value}" for key, value in found.items() if key.startswith(CODE))])


def _cudnn(device: torch.device) -> Environment:
    """Version of the library of a GPU's convolutions, which can be another under the same PyTorch."""
    version = None
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError):  # a version that PyTorch considers incompatible
            version = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return {} if version is None else {"cudnn": version}


def _processor() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found.group(1).strip() if found else platform.processor()
