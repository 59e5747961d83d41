"""The record of a measurement: how it was made, and what it found."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from atoll.core.environment import environment
from atoll.core.provenance import version


def write(path: Path | None, found: Mapping[str, Any], packages: tuple[str, ...] = ()) -> None:
    """Write a record as JSON.

    Args:
        path: The file; None to write nothing.
        found: What was measured.
        packages: Further packages whose versions matter.
    """
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        record = {**made(packages), **found}
        path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", "utf-8")


def made(packages: tuple[str, ...] = ()) -> dict[str, Any]:
    """Command, version with its commit, hardware, versions, and the machine's load over 1, 5 and 15 minutes."""
    arguments = sys.argv[1:]
    if "--json" in arguments:
        del arguments[(at := arguments.index("--json")) : at + 2]  # where the record is says nothing about it
    return {
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *arguments]),
        "version": version(),
        "environment": environment(torch.device("cpu"), torch.get_num_threads()),
        "cores": os.cpu_count(),
        "load": [round(load, 2) for load in os.getloadavg()],
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in packages},
        },
    }
