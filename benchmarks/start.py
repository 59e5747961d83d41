"""What a worker process needs before its first job: CPU seconds, beside those of PyTorch itself.

    python benchmarks/start.py [--turns N] [--json FILE]

Each turn is a process of its own with one thread. PyTorch is imported and takes one optimiser step, which imports
half of it; torchvision, Atoll, a recipe of 5,000 made-up images and its federation follow.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from measured import write

STEPS = {
    "import torch": "import torch; torch.set_num_threads(1)",
    "first optimiser step": (
        "w = torch.zeros(3, requires_grad=True); w.sum().backward(); torch.optim.SGD([w], 0.1).step()"
    ),
    "import torchvision": "import torchvision",
    "import Atoll's worker": "import atoll.engines.executors",
    "recipe and federation": (
        "from atoll.engines.federation import Federation; from atoll.recipe.recipe import load_recipe;"
        "Federation(load_recipe('digits', ['data.source=synthetic', 'data.limit=5000', 'data.image_size=32',"
        "'data.channels=3', 'partition.kind=iid']))"
    ),
}
CHILD = """
import json, sys, time
names, found = json.loads(sys.argv[1]), {}
for name, code in names.items():
    before = time.process_time()
    exec(code)
    found[name] = time.process_time() - before
print(json.dumps(found))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    command = [sys.executable, "-c", CHILD, json.dumps(STEPS)]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    turns = []
    for _ in range(options.turns):
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=one_thread)
        turns.append(json.loads(done.stdout.splitlines()[-1]))
    rows = {name: [round(turn[name], 3) for turn in turns] for name in STEPS}
    for name, seconds in rows.items():
        print(f"{name:24} {statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})")
    write(options.json, {"cpu_seconds": rows})


if __name__ == "__main__":
    main()
