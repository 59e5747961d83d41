"""A run that ends with several models: one number for all, and each one's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atoll.evaluation.suite import Results


def mean_over_clients(by_model: Mapping[str, Results], clients: Mapping[str, int]) -> dict[str, Any]:
    """The numbers of a run's models, each counted once for every client that uses it.

    Args:
        by_model: what `evaluate` says of each model; at least one.
        clients: how many clients use it. If nobody uses any, all count alike.

    Returns:
        One model's own numbers. Of several models the means, with ``"by_model"`` and ``"clients_by_model"``
        beside them; a constant of the protocol stays what it is, and a text or a list is the first model's.
    """
    results: list[dict[str, Any]] = [dict(found) for found in by_model.values()]
    if len(results) == 1:
        return results[0]
    weights = [clients[name] for name in by_model]
    if not sum(weights):
        weights = [1] * len(results)
    mean: dict[str, Any] = {}
    for key, value in results[0].items():
        if all(result.get(key) == value for result in results):  # a constant of the protocol, most likely
            mean[key] = value
        elif isinstance(value, int | float) and not isinstance(value, bool):
            mean[key] = sum(w * r[key] for w, r in zip(weights, results, strict=True)) / sum(weights)
        else:
            mean[key] = value
    return {**mean, "by_model": dict(by_model), "clients_by_model": dict(clients)}
