"""FedCA's ablation (Fig. 5) under readings of what the paper leaves open, on a small part of CIFAR-10.

    python benchmarks/fedca_readings.py run ARM SEED… --data DIR  # missing runs; an interrupted one continues
    python benchmarks/fedca_readings.py table                     # paired differences to the base of each reading

DIR holds ``cifar10/`` and, for the public images, ``tiny-imagenet/``. An arm is ``LENGTH/READING/MODULES``, by
their names below. Records are in ``results/fedca_readings.json``; a recorded run is not repeated. The alignment
model of a seed is trained once for all arms whose networks and number of epochs are the same.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import platform
import shutil
import statistics
from pathlib import Path
from typing import Any

import atoll
from atoll.core.files import write_whole

RESULTS = Path(__file__).parent / "results" / "fedca_readings.json"
# Five clients of two classes each, as in the paper; 500 images each.
SCALE = (
    *("partition.kind=shards", "partition.clients=5", "partition.classes_per_client=2"),
    *("data.limit=2500", "model.width=8", "train.participation=1.0", "train.epochs=2"),
    *("train.optimizer=adam", "train.lr=0.001", "train.weight_decay=1e-6"),
    *("engine.workers=1", "engine.threads=1"),
    *("evaluation.geometry_samples=2000", "evaluation.map_points=0", "evaluation.probe_epochs=100"),
)
DICTIONARY, ALIGNMENT = "options.fedca_dictionary", "options.fedca_alignment"
PUBLIC = (
    *(f"{ALIGNMENT}.data.source=parquet", f"{ALIGNMENT}.data.path=tiny-imagenet"),
    *(f"{ALIGNMENT}.data.limit=2500", f"{ALIGNMENT}.data.image_size=32"),
)
# Rounds of the federation, and epochs of the alignment model.
LENGTHS = {"short": (4, 5), "long": (20, 20)}
LITERAL = (
    *("model.projector_final_norm=none", f"{DICTIONARY}.temperature=0.5"),
    *(f"{DICTIONARY}.row_images=plain", f"{ALIGNMENT}.reduction=sum", f"{ALIGNMENT}.normalise=false"),
    f"{ALIGNMENT}.batch_norm=train",
)
CHOSEN = (
    *(f"{DICTIONARY}.temperature=0.1", f"{ALIGNMENT}.normalise=true", f"{ALIGNMENT}.batch_norm=running"),
)
READINGS: dict[str, tuple[str, ...]] = {
    "literal": LITERAL,
    "cold": (*LITERAL, *CHOSEN),
    "centred": (*LITERAL, *CHOSEN, "model.projector_final_norm=plain"),
    "centred-views": (
        *LITERAL,
        *CHOSEN,
        "model.projector_final_norm=plain",
        f"{DICTIONARY}.row_images=views",
    ),
}
MODULES: dict[str, tuple[str, ...]] = {
    "base": ("method.terms=[]", f"{DICTIONARY}.size=0"),
    "dictionary": ("method.terms=[]", f"{DICTIONARY}.size=1024"),
    "alignment": (f"{DICTIONARY}.size=0", *PUBLIC),
    "both": (f"{DICTIONARY}.size=1024", *PUBLIC),
}


def settings(arm: str, seed: int) -> list[str]:
    """List the settings of an arm, over the preset ``cifar10-table``."""
    length, reading, modules = arm.split("/")
    rounds, epochs = LENGTHS[length]
    terms = "method.terms=[]" in MODULES[modules]
    read = [one for one in READINGS[reading] if not (terms and one.startswith(ALIGNMENT))]
    aligned = [] if terms else [f"{ALIGNMENT}.train_epochs={epochs}"]
    lasting = [f"train.rounds={rounds}", f"seed={seed}"]
    return [*SCALE, "method.name=fedca", *read, *MODULES[modules], *aligned, *lasting]


def run(arm: str, seed: int, work: Path) -> dict[str, Any]:
    """Train an arm, or continue its training, and return its record."""
    folder = work / f"{arm.replace('/', '-')}-{seed}"
    recipe = atoll.load_recipe("cifar10-table", settings(arm, seed))
    norm = recipe.model.projector_final_norm
    temperature = recipe.options.get("fedca_dictionary", {}).get("temperature")
    model = work / f"alignment-{arm.split('/')[0]}-{norm}-{seed}"
    aligned = "fedca_alignment" in recipe.options
    done = folder / "recipe.toml"
    if aligned and model.is_dir() and not done.exists():
        shutil.copytree(model, folder / "prerequisites")
        done.write_text(recipe.to_toml(), "utf-8")
    made = atoll.simulate(recipe, folder, resume=done.exists())
    if aligned and not model.exists():
        shutil.copytree(folder / "prerequisites", model)
    found = made.read_json("evaluation.json") or {}
    trained = atoll.Run(folder / "prerequisites" / "alignment").metrics if aligned else []
    return {
        "untrained": {key: made.metrics[0]["evaluation"][f"{key}/accuracy"] for key in ("knn", "probe")},
        "knn": found["knn/accuracy"],
        "probe": found["probe/accuracy"],
        "uniformity": found["geometry/uniformity"],
        "effective_rank": found["geometry/effective_rank"],
        "losses": [{k: v for k, v in line.items() if k.startswith("loss")} for line in made.metrics[1:]],
        "alignment_loss": [line.get("loss") for line in trained[1:]],
        "temperature": temperature,
        "version": found["version"],
        "machine": f"{platform.machine()}, one thread",
    }


def records() -> dict[str, dict[str, Any]]:
    """Load all records: by arm, then by seed."""
    return json.loads(RESULTS.read_text("utf-8")) if RESULTS.is_file() else {}


def add(arm: str, seed: int, record: dict[str, Any], work: Path) -> None:
    """Add a record; several processes may do so."""
    with (work / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = records()
        found.setdefault(arm, {})[str(seed)] = record
        ordered = {name: dict(sorted(found[name].items())) for name in sorted(found)}
        write_whole(RESULTS, (json.dumps(ordered, indent=1) + "\n").encode())


def table() -> str:
    """Format the accuracies, and the paired differences to the base of the same reading with standard error."""
    lines = [
        "| length | reading | modules | seeds | kNN % | probe % | Δ kNN | Δ probe |",
        "| --- | --- | --- | --- | ---: | ---: | ---: | ---: |",
    ]
    found = records()
    for arm, by_seed in found.items():
        length, reading, modules = arm.split("/")
        base = found.get(f"{length}/{reading}/base", {})
        cells = [_spread([100 * one[key] for one in by_seed.values()], "±") for key in ("knn", "probe")]
        for key in ("knn", "probe"):
            paired = [100 * (by_seed[seed][key] - base[seed][key]) for seed in by_seed if seed in base]
            cells.append(_spread(paired, "±", error=True) if modules != "base" and paired else "")
        lines.append(
            f"| {length} | {reading} | {modules} | {', '.join(by_seed)} | " + " | ".join(cells) + " |"
        )
    return "\n".join(lines)


def _spread(values: list[float], sign: str, error: bool = False) -> str:
    mean = statistics.fmean(values)
    text = f"{mean:+.2f}" if error else f"{mean:.2f}"
    if len(values) < 2:
        return text
    spread = statistics.stdev(values) / (len(values) ** 0.5 if error else 1)
    return f"{text} {sign} {spread:.2f}"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("arm", nargs="?", help="LENGTH/READING/MODULES")
    parser.add_argument("seeds", nargs="*", type=int)
    parser.add_argument("--data", help="folder of the data, as ATOLL_DATA")
    parser.add_argument("--work", type=Path, default=Path("runs/fedca-readings"))
    asked = parser.parse_args()
    if asked.what == "table":
        print(table())
        return
    if asked.data:
        os.environ["ATOLL_DATA"] = asked.data
    asked.work.mkdir(parents=True, exist_ok=True)
    for seed in asked.seeds:
        if str(seed) not in records().get(asked.arm, {}):
            add(asked.arm, seed, run(asked.arm, seed, asked.work), asked.work)


if __name__ == "__main__":
    main()
