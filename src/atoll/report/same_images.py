"""Whether the rows of a table of results were measured on the same images, so that they can be compared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from atoll.core.run_folder import SITES_OWN
from atoll.report.groups import Group, differences


def other_images(groups: Sequence[Group]) -> str:
    """A sentence that says in which images the runs differ, so that no accuracy is the best one; or nothing."""
    recipes = differences([group.recipe for group in groups])
    # Earlier versions did not record the images.
    known = all(run.held_out for group in groups for run in group.runs)
    same = {"data.memory_gib", *(["data.path"] if known else [])}
    keys = [key for key in recipes if key.startswith("data.") and key not in same]
    if keys:
        return f"No value is bold, because the runs differ in their images ({', '.join(keys)})."
    seen: defaultdict[tuple[Any, ...], set[Any]] = defaultdict(set)  # by seed where each has its own
    for run in (run for group in groups for run in group.runs):
        first = of_a_model(run.results)
        if "knn/test_images" in first:
            seen["evaluated", run.seed, "count"].add((run.results.get("split"), first["knn/test_images"]))
        if run.results.get("split") == SITES_OWN:
            seen["evaluated", None, "sites"].add(frozenset(run.results.get("sites", ())))
        if run.held_out:
            seen["evaluated", None if run.images else run.seed].add(run.held_out)
        if run.images and run.images[1]:
            seen["trained", None].add(run.images[1])
    differ = [done for (done, *_), found in seen.items() if len(found) > 1]
    return f"No value is bold, because the runs were not {min(differ)} on the same images." if differ else ""


def other_baseline(groups: Sequence[Group]) -> str:
    """A sentence that says why a method's result cannot be compared with its first encoder's; or nothing."""
    reason = other_sites(groups)
    return f"No value is bold, because {reason}." if reason else ""


def other_sites(groups: Sequence[Group]) -> str:
    """Say which sites measured only the encoder before the training, or only the one after it; or nothing."""
    once: dict[str, set[str]] = {"before": set(), "after": set()}
    for run in (run for group in groups for run in group.runs):
        if run.untrained.get("split") == run.results.get("split") == SITES_OWN:
            before, after = run.untrained.get("sites", {}).keys(), run.results.get("sites", {}).keys()
            once["before"] |= before - after
            once["after"] |= after - before
    words = [f"only {when}: {', '.join(sorted(names))}" for when, names in once.items() if names]
    return f"different sites measured before and after the training ({'; '.join(words)})" if words else ""


def of_a_model(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """The result of a model, which has the protocols' constants: the first one if there are several."""
    return next(iter(result.get("by_model", {}).values()), result)
