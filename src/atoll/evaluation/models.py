"""Mean of results over models or over sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from atoll.evaluation.client_tests import join_models
from atoll.evaluation.metrics import constants
from atoll.evaluation.suite import Results


def mean_results(results: Sequence[Mapping[str, Any]], weights: Sequence[float]) -> dict[str, Any]:
    """Compute the weighted mean of each number over the results that have it.

    Args:
        results: The results; at least one.
        weights: One weight per result. For a number, if the weights of the results that have it sum to 0, these
            results have equal weight.

    Returns:
        The means. A value that is equal in all results, such as a protocol's constant, keeps its type; a text or a
        list is that of the first result.
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
    """Average the results of a run's models, weighted by the number of clients that use each model.

    Args:
        by_model: The results of `evaluate` for each model; at least one.
        clients: The number of clients that use each model. If no model has a client, all have equal weight.

    Returns:
        The results of a single model unchanged. For several models, the means of `mean_results` with
        ``"by_model"`` and ``"clients_by_model"`` added; client-local tests are joined by `join_models`.
    """
    if len(by_model) == 1:
        return dict(next(iter(by_model.values())))
    mean = mean_results(list(by_model.values()), [clients[name] for name in by_model])
    tests = join_models(list(by_model.values()))
    return {**mean, **tests, "by_model": dict(by_model), "clients_by_model": dict(clients)}


def mean_over_sites(results: Sequence[Mapping[str, float]], images: Sequence[int]) -> dict[str, float]:
    """Average the results of sites, weighted by their held-out images; numbers of images and labels are summed.

    A protocol's constants have no mean: one that differs, such as k at a site with fewer images, is left out.

    Args:
        results: The results of each site.
        images: The number of held-out images of each site.
    """
    counts = {
        key: sum(result.get(key, 0) for result in results)
        for result in results
        for key in result
        if key.endswith(("images", "/labels"))
    }
    fixed = {
        f"{protocol}/{name}"
        for one in results
        for protocol, found in constants(one).items()
        for name in found
    }
    differing = {key for key in fixed if len({one[key] for one in results if key in one}) > 1}
    mean = {key: value for key, value in mean_results(results, images).items() if key not in differing}
    return mean | counts
