"""Run folders without the runs: only what a report reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch

from atoll.core.tree import save

CLASSES = ["cat", "dog", "<script>alert('x')</script>"]


def evaluation(
    knn: float, probe: float = 0.8, uniformity: float = -1.5, rank: float = 20.0
) -> dict[str, Any]:
    """A result as `atoll.evaluation.evaluate` gives it."""
    return {
        "split": "test",
        "knn/accuracy": knn,
        "knn/k": 20,
        "knn/temperature": 0.1,
        "knn/test_images": 400,
        "probe/accuracy": probe,
        "probe/name": "ssd",
        "probe/lr": 0.003,
        "probe/optimizer": "adam",
        "probe/epochs": 200,
        "probe/batch_size": 512,
        "geometry/uniformity": uniformity,
        "geometry/effective_rank": rank,
        "geometry/alignment": 0.5,
        "geometry/singular_values": [8.0, 4.0, 2.0, 1.0],
    }


def make_run(
    folder: Path,
    method: str = "ssd",
    seed: int = 0,
    results: dict[str, Any] | None = None,
    rounds: int = 3,
    asked: int = 3,
    labels: bool = True,
    clients: int = 4,
    recipe: dict[str, Any] | None = None,
    points: int = 50,
) -> Path:
    """Write the folder of a run."""
    folder.mkdir(parents=True)
    table = {
        "name": method,
        "title": "Tiny & fast",
        "seed": seed,
        "data": {"source": "digits"},
        "model": {"encoder": "resnet-narrow"},
        "method": {"name": method, "objective": "align_uniform"},
        "options": {},
        "train": {"rounds": asked, "lr": 0.05},
        "engine": {"workers": 1},
        **(recipe or {}),
    }
    (folder / "recipe.toml").write_text(tomli_w.dumps(table))
    lines: list[dict[str, Any]] = [{"round": 0, "evaluation": evaluation(0.5 + 0.001 * seed, 0.4)}]
    for round in range(1, rounds + 1):
        line = {
            "round": round,
            "loss": 2.0 / round,
            "bytes_up": 1_500_000,
            "bytes_down": 2_500_000,
            "seconds": 1.5,
        }
        lines.append({**line, "evaluation": evaluation(0.6 + 0.05 * round)})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 30, (clients, len(CLASSES)))
    partition = {
        "num_samples": int(counts.sum()),
        "seed": seed,
        "options": {"kind": "dirichlet", "alpha": 0.1, "variant": "moon"},
        "label_distance": 1.2345 if labels else None,
        "classes": CLASSES if labels else [],
        "clients": [
            {"name": str(k), "size": int(row.sum()), "label_counts": row.tolist() if labels else None}
            for k, row in enumerate(counts)
        ],
    }
    (folder / "partition.json").write_text(json.dumps(partition))
    if rounds == asked:
        about = {"round": rounds, "egress": ["weights", "a <b>count</b>"], "keeps": [], "version": "9.8.7"}
        (folder / "evaluation.json").write_text(json.dumps({**(results or evaluation(0.9)), **about}))
        save(
            folder / "map.safetensors",
            {
                "points": torch.from_numpy(rng.normal(size=(points, 2)).astype(np.float32)),
                "thumbnails": thumbnails(points),
                "labels": torch.arange(points) % len(CLASSES) if labels else None,
                "classes": CLASSES if labels else [],
            },
        )
    return folder


def thumbnails(count: int, channels: int = 1) -> torch.Tensor:
    """Noise, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, channels, 8, 8), dtype=torch.uint8, generator=generator)
