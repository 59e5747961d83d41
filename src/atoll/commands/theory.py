"""``atoll theory``: Dec-SSL's theorem and proposition, checked on data drawn as their proofs say."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.core.errors import UserError
from atoll.core.files import write_whole
from atoll.core.provenance import version
from atoll.core.rng import stream
from atoll.core.threads import threads
from atoll.functional import representability
from atoll.functional.skewed_sources import (
    feature_correlations,
    max_margin,
    self_supervised_map,
    skewed_source,
)
from atoll.report.theory import theory_picture

FIT = 300  # the constants are taken from dimensions up to this one, and checked at larger ones
Progress = Callable[[str], None]


@dataclass(frozen=True)
class TheorySettings:
    """What determines the numbers.

    Attributes:
        samples: Samples of each frequent class, as a multiple of d.
        width: Rows of the self-supervised map, as a multiple of the number of sources.
    """

    samples: float = 1.0
    width: int = 2

    def sources(self, dim: int) -> int:
        """K = ⌈2 d^(1/20)⌉, of the order that the paper sets."""
        return math.ceil(2 * math.pow(dim, 0.05))

    def rare(self, dim: int) -> int:
        """Samples of each rare class: as many as K of them may have, d^(1/5) together, and at least one."""
        return max(1, int(dim**0.2) // self.sources(dim))


def run_theory(
    dims: Sequence[int], seeds: int, out: Path, settings: TheorySettings, progress: Progress
) -> dict[str, Any]:
    """Measure all dimensions and seeds, and write ``theory.json`` and ``theory.svg``; resumes automatically.

    Args:
        dims: The dimensions d.
        seeds: Number of seeds of each dimension.
        out: Folder of the results; what it holds of the same settings is not measured again.
        settings: What else determines the numbers.
        progress: Called with a line after each measurement.

    Returns:
        What ``theory.json`` holds: settings, measurements and summary.

    Raises:
        UserError: A dimension or a number of seeds is too small, or the folder holds results of other settings.
    """
    if seeds < 1 or any(dim < 20 for dim in dims):
        raise UserError("atoll theory needs at least one seed, and dimensions of at least 20")
    if not (math.isfinite(settings.samples) and settings.samples * min(dims) >= 1):
        raise UserError("atoll theory needs at least one sample of each frequent class; raise --samples")
    path = out / "theory.json"
    rows = _measured(path, settings)
    done = {(row["d"], row["seed"]) for row in rows}
    wanted = [(dim, seed) for dim in sorted(set(dims)) for seed in range(seeds)]
    for dim, seed in wanted:
        if (dim, seed) not in done:
            with threads(1):
                rows.append({**measure(dim, seed, settings), "version": version()})
            progress(f"d = {dim}, seed {seed}")
            _write(path, settings, rows)
    chosen = [row for row in rows if (row["d"], row["seed"]) in wanted]
    write_whole(out / "theory.svg", theory_picture(chosen, summarise(chosen)).encode())
    return _write(path, settings, rows, summarise(chosen))


def _measured(path: Path, settings: TheorySettings) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    try:
        record = json.loads(path.read_text("utf-8"))
        found, rows = dict(record["settings"]), list(record["measurements"])
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path} is damaged; remove it") from None
    if found != asdict(settings):
        others = ", ".join(f"{name} = {value}" for name, value in found.items())
        raise UserError(f"{path} holds results of other settings ({others}); choose these or another --out")
    return rows


def _write(
    path: Path,
    settings: TheorySettings,
    rows: Sequence[dict[str, Any]],
    summary: dict[str, Any] | None = None,
) -> dict[str, Any]:
    record = {"settings": asdict(settings), "summary": summary, "measurements": list(rows)}
    write_whole(path, (json.dumps(record, indent=1) + "\n").encode())
    return record


def measure(dim: int, seed: int, settings: TheorySettings) -> dict[str, Any]:
    """Draw all sources of one dimension and seed, and solve both objectives.

    Returns:
        ``local`` and ``global``: representabilities of e_1 … e_K by the self-supervised solution of each source and
        of all; ``supervised``: correlations of the supervised features of each source with them;
        ``supervised_local``: their representabilities. ``noise`` and ``supervised_noise`` are means over the other
        axes.
    """
    sources, frequent = settings.sources(dim), max(1, round(settings.samples * dim))
    rows = settings.width * sources
    found: dict[str, list[Any]] = {
        name: [] for name in ("local", "noise", "supervised", "supervised_local", "supervised_noise")
    }
    total = torch.zeros(dim, dim, dtype=torch.float64)
    for source in range(sources):
        generator = stream(seed, "theory", dim, source)
        x, y = skewed_source(dim, sources, source, frequent, settings.rare(dim), generator)
        second_moment = x.T @ x / len(x)
        total += second_moment / sources
        local = representability(self_supervised_map(second_moment, rows))
        w = max_margin(x, y, 2 * sources)
        correlations = feature_correlations(w)
        found["local"].append(local[:sources].tolist())
        found["noise"].append(float(local[sources:].mean()))
        found["supervised"].append(correlations[:sources].tolist())
        found["supervised_noise"].append(float(correlations[sources:].mean()))
        found["supervised_local"].append(representability(_spanning(w))[:sources].tolist())
    whole = representability(self_supervised_map(total, rows))
    return {
        "d": dim,
        "seed": seed,
        "sources": sources,
        "rows": rows,
        "frequent": frequent,
        "rare": settings.rare(dim),
        **found,
        "global": whole[:sources].tolist(),
    }


def _spanning(w: Tensor) -> Tensor:
    """The classifier without singular values that the solver's tolerance alone leaves."""
    left, scales, axes = torch.linalg.svd(w, full_matrices=False)
    kept = scales > 1e-3 * scales[0]
    spanning: Tensor = left[:, kept] * scales[kept] @ axes[kept]
    return spanning


def summarise(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Summarise measurements by dimension, with the constants of the bounds and whether they hold.

    ``c`` is the smallest constant for which all representabilities of common directions (e_j with j ≠ k by source
    k, all e_j by the global solution) are at least 1 − c·d^(−4/5) at dimensions up to 300, or at the smallest if
    all are larger. ``c_supervised`` is that of correlations ≤ c·d^(−1/10). ``slopes`` are of the logarithm of the
    mean over the logarithm of d.
    """
    dims = sorted({row["d"] for row in rows})
    by_dim = {}
    for dim in dims:
        some = [row for row in rows if row["d"] == dim]
        common = [1 - r for row in some for r in _others(row["local"])]
        shared = [1 - r for row in some for r in row["global"]]
        cross = [value for row in some for value in _others(row["supervised"])]
        own = [row["supervised"][k][k] for row in some for k in range(row["sources"])]
        by_dim[str(dim)] = {
            "seeds": len(some),
            "sources": some[0]["sources"],
            "c_local": max(common) * dim**0.8,
            "c_global": max(shared) * dim**0.8,
            "c_supervised": max(cross) * dim**0.1,
            "loss_local": _mean(common),
            "loss_global": _mean(shared),
            "own_direction": _mean([row["local"][k][k] for row in some for k in range(row["sources"])]),
            "cross_correlation": _mean(cross),
            "own_correlation": _mean(own),
            "least_own_correlation": min(own),
            "noise_correlation": _mean([sum(row["supervised_noise"]) / row["sources"] * dim for row in some]),
        }
    fit = [dim for dim in dims if dim <= FIT] or [min(dims)]
    fitted = [by_dim[str(dim)] for dim in fit]
    c = max(max(one["c_local"], one["c_global"]) for one in fitted)
    c_supervised = max(one["c_supervised"] for one in fitted)
    for one in by_dim.values():
        one["holds"] = max(one["c_local"], one["c_global"]) <= c
        one["holds_supervised"] = one["c_supervised"] <= c_supervised
    slopes = {
        name: _slope({dim: by_dim[str(dim)][name] for dim in dims})
        for name in ("loss_local", "loss_global", "cross_correlation")
    }
    return {"c": c, "c_supervised": c_supervised, "fitted_up_to": max(fit), "slopes": slopes, "dims": by_dim}


def _others(table: Sequence[Sequence[float]]) -> list[float]:
    """The entries off the diagonal."""
    return [value for k, row in enumerate(table) for j, value in enumerate(row) if j != k]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _slope(points: dict[int, float]) -> float | None:
    """Slope of the line of least squares through the logarithms; None for a single point."""
    if len(points) < 2:
        return None
    x, y = ([math.log(value) for value in values] for values in (points.keys(), points.values()))
    mean_x, mean_y = _mean(x), _mean(y)
    above = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return above / sum((a - mean_x) ** 2 for a in x)
