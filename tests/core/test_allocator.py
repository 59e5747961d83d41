"""The allocator: freed memory stays with the process, so that the kernel does not provide it again."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from atoll.core.allocator import OWN_CHOICE, keep_freed_memory

FAULTS = """
import resource, sys
import torch
from atoll.core.allocator import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
def step():
    torch.cat([torch.ones(1 << 21) for _ in range(16)][:1])  # frees 128 MiB in blocks of 8 MiB
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    """Page faults of ten steps in a process of its own."""
    command = [sys.executable, "-c", FAULTS, how]
    plain = {name: value for name, value in os.environ.items() if not name.startswith(OWN_CHOICE)}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=plain)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="sets glibc's allocator")
def test_a_step_uses_the_memory_that_the_step_before_freed() -> None:
    default = faults("default")
    if not default:
        pytest.skip("this kernel reports no page faults, even of the default allocator: nothing to compare")
    assert faults("kept") < 0.1 * default


def test_the_user_s_own_choice_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MALLOC_ARENA_MAX", "GLIBC_TUNABLES", "LD_PRELOAD"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "")
            assert not keep_freed_memory.__wrapped__()
