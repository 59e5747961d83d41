"""One number for several: the mean of results over models or over sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from atoll.evaluation.suite import Results


def mean_results(results: Sequence[Mapping[str, Any]], weights: Sequence[float]) -> dict[str, Any]:
    """The weighted mean of each number, over the results that have it.

    Args:
        results: at least one.
        weights: one each. If those of the results that have a number sum to 0, these count equally.

    Returns:
        The means. A value that all share, such as a protocol's constant, keeps its type; a text or a list is the
        first result's.
    """
    mean: dict[str, Any] = {}
    for key in dict.fromkeys(key for result in results for key in result):
        values, shares = zip(
            *((result[key], w) for result, w in zip(results, weights, strict=True) if key in result),
            strict=True,
        )
        first = values[0]
        is_number = isinstance(first, int | float) and not isinstance(first, bool)
        if not is_number or all(value == first for value in values):
            mean[key] = first
            continue
        if not sum(shares):
            shares = (1,) * len(shares)
        mean[key] = sum(w * value for w, value in zip(shares, values, strict=True)) / sum(shares)
    return mean


def mean_over_clients(by_model: Mapping[str, Results], clients: Mapping[str, int]) -> dict[str, Any]:
    """The numbers of a run's models, each counted once for every client that uses it.

    Args:
        by_model: what `evaluate` measured of each model; at least one.
        clients: how many clients use it. If nobody uses any, all count equally.

    Returns:
        One model's own numbers. Of several models the means, as `mean_results` makes them, with ``"by_model"`` and
        ``"clients_by_model"`` beside them.
    """
    if len(by_model) == 1:
        return dict(next(iter(by_model.values())))
    mean = mean_results(list(by_model.values()), [clients[name] for name in by_model])
    return {**mean, "by_model": dict(by_model), "clients_by_model": dict(clients)}


def mean_over_sites(results: Sequence[Mapping[str, float]], images: Sequence[int]) -> dict[str, float]:
    """The numbers of sites, weighted by their held-out images; counts of images add up."""
    counts = {
        key: sum(result.get(key, 0) for result in results)
        for result in results
        for key in result
        if key.endswith("images")
    }
    return mean_results(results, images) | counts
