"""One of the processes that train a site's client together; an entry point (see `launcher`)."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from threading import Thread

import torch.distributed as dist

from atoll.core.files import private_files
from atoll.core.tree import load, save
from atoll.engines.flower.client_app import checked
from atoll.engines.flower.launcher import ANSWER, REQUEST
from atoll.engines.flower.site import SiteSide
from atoll.engines.flower.site_options import SiteOptions

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # that torchrun sets


def main(job: Path) -> int:
    """Answer the request in a folder, together with the other processes; return the exit status."""
    Thread(target=_end_with_input, daemon=True).start()
    if missing := [name for name in VARIABLES if name not in os.environ]:
        save(job / ANSWER, {"lost": f"the launcher must set {', '.join(missing)}, as torchrun does"})
        return 1
    given = load(job / REQUEST)
    options = SiteOptions(**given["options"])
    on_gpus = options.device == "cuda"
    if on_gpus:
        options = replace(options, device=f"cuda:{os.environ['LOCAL_RANK']}")
    dist.init_process_group("nccl" if on_gpus else "gloo")
    answer = checked(SiteSide.train, SiteSide(options, together=True), given["request"])
    # A failed process answers for all: the others wait for it until the launcher ends them.
    if "lost" in answer or dist.get_rank() == 0:
        save(job / ANSWER, answer)
    if "lost" in answer:
        return 1
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _end_with_input() -> None:
    """End this process when the one that asked for it has ended."""
    # Not through sys.stdin: Python aborts at its end while a thread reads from a buffer.
    while os.read(0, 1024):
        pass
    os._exit(1)


if __name__ == "__main__":
    with private_files():
        sys.exit(main(Path(sys.argv[1])))
