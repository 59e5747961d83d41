"""Mean of results over models or over sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from atoll.core.given import names_code
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
        having = [(result[key], w) for result, w in zip(results, weights, strict=True) if key in result]
        numbers = [one for one in having if isinstance(one[0], int | float) and not isinstance(one[0], bool)]
        values, shares = zip(*(numbers or having), strict=True)
        if not numbers or all(value == values[0] for value in values):
            mean[key] = values[0]
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
        The results of a single model unchanged. For several models, the means of `mean_results`, without
        protocols' constants that differ between models, and with ``"by_model"`` and ``"clients_by_model"`` added;
        client-local tests are joined by `join_models`.
    """
    if len(by_model) == 1:
        return dict(next(iter(by_model.values())))
    results = list(by_model.values())
    mean = _without_differing(mean_results(results, [clients[name] for name in by_model]), results)
    tests = join_models(results)
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
        if key.endswith(("images", "/labels")) and not names_code(key)
    }
    return _without_differing(mean_results(results, images), results) | counts


def _without_differing(mean: dict[str, Any], results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Leave out constants of protocols that are not the same in all results."""
    fixed = [
        {f"{protocol}/{name}" for protocol, found in constants(one).items() for name in found}
        for one in results
    ]

    def differs(key: str) -> bool:
        having = [(one[key], key in known) for one, known in zip(results, fixed, strict=True) if key in one]
        return all(known for _, known in having) and len({value for value, _ in having}) > 1

    return {key: value for key, value in mean.items() if not differs(key)}
