"""What measurements share: the clock of a run, and the record of how they were made and what they found."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from atoll.core.environment import environment
from atoll.core.provenance import version
from atoll.engines.callbacks import Callback


class Clock(Callback):
    """Callback of a run that reads the clock before the first round and at the end of each.

    Attributes:
        times: The readings in seconds.
    """

    def __init__(self) -> None:
        self.times: list[float] = []

    def begin(self, federation: object, server: object) -> None:
        """Read the clock."""
        self.times.append(time.perf_counter())

    def round(self, record: object, line: object) -> None:
        """Read the clock."""
        self.times.append(time.perf_counter())

    @property
    def rounds(self) -> list[float]:
        """Seconds of each round."""
        return [end - start for start, end in pairwise(self.times)]


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
    arguments = [word for word in sys.argv[1:] if not word.startswith("--json=")]  # the record's own place
    if "--json" in arguments:
        del arguments[(at := arguments.index("--json")) : at + 2]
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
