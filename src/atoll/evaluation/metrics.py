"""Every measurement: its key, the function that computes it, and how it is printed.

The report, the terminal and the docs read headings, factors, digits and directions from here only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from atoll.core.given import names_code
from atoll.evaluation.client_tests import PREFIX
from atoll.evaluation.options import CLASSIFIERS
from atoll.evaluation.protocols import FINE_TUNES, PAPERS_PROBES

ACCURACY = "/accuracy"  # ends the key of every protocol's accuracy
_MOST_DIGITS = 12  # after the point
PERCENTILES = (5, 25, 50, 75, 95)  # of the angles: whiskers, box and median of a box plot


@dataclass(frozen=True)
class Metric:
    """One measurement.

    Attributes:
        key: Key in ``evaluation.json`` and in the evaluations of ``metrics.jsonl``; for a round's own measurements,
            key in a line of ``metrics.jsonl``.
        heading: Heading of its column or its curve.
        function: Dotted name of the function that computes it.
        meaning: Meaning, in one line.
        place: Where the report prints it: in the table of results, in the table of the geometry, or only as a
            curve.
        unit: Unit of the printed value.
        better: Which values are better; empty if neither larger nor smaller ones are.
        digits: Number of digits after the point.
        factor: Factor from the stored value to the printed one.
    """

    key: str
    heading: str
    function: str
    meaning: str
    place: Literal["results", "geometry", "curve"]
    unit: str = ""
    better: Literal["higher", "lower", ""] = ""
    digits: int = 3
    factor: float = 1.0

    @property
    def title(self) -> str:
        """The heading with the unit."""
        if not self.unit:
            return self.heading
        return f"{self.heading} %" if self.unit == "%" else f"{self.heading}, {self.unit}"

    def values(self, results: Iterable[Mapping[str, Any]]) -> list[float]:
        """The printed values of all results that have a finite one."""
        found = (result.get(self.key) for result in results)
        return [
            self.factor * value
            for value in found
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        ]


def _accuracy(protocol: str, function: str, meaning: str) -> Metric:
    heading = "kNN" if protocol == "knn" else protocol
    return Metric(protocol + ACCURACY, heading, function, meaning, "results", "%", "higher", 2, 100.0)


def _geometry(key: str, heading: str, function: str, meaning: str, **rest: Any) -> Metric:
    return Metric(f"geometry/{key}", heading, f"atoll.functional.{function}", meaning, **rest)


def _client_accuracies(protocol: str) -> list[Metric]:
    """The summary of a client-local test."""
    heading = "kNN" if protocol == "knn" else protocol
    return [
        Metric(
            f"{PREFIX}{protocol}/{key}",
            f"{heading}, {name}",
            "atoll.evaluation.client_tests.client_accuracies",
            f"{meaning} of each client's share of the test images, with the client's model, under `{protocol}`",
            "results",
            "%",
            better,
            2,
            100.0,
        )
        for key, name, meaning, better in _CLIENT_SUMMARY
    ]


_CLIENT_SUMMARY: tuple[tuple[str, str, str, Literal["higher", "lower"]], ...] = (
    ("accuracy", "mean of clients", "mean of the accuracies", "higher"),
    ("weighted_accuracy", "clients by size", "mean, weighted by images, of the accuracies", "higher"),
    ("worst_accuracy", "worst client", "lowest of the accuracies", "higher"),
    ("accuracy_std", "std of clients", "standard deviation of the accuracies", "lower"),
)
_PROBE, _FINE_TUNE = "atoll.evaluation.probe.linear_probe", "atoll.evaluation.finetune.finetune"

KNN = _accuracy(
    "knn",
    "atoll.evaluation.knn.knn_predictions",
    "accuracy of a weighted k-nearest-neighbour vote on normalised representations",
)
ALIGNMENT = _geometry(
    "alignment",
    "alignment",
    "alignment",
    "mean ‖ĥ − ĥ⁺‖² over two views of the test images",
    place="geometry",
)
SINGULAR_VALUES = Metric(
    "geometry/singular_values",
    "σᵢ ∕ σ₁",
    "atoll.evaluation.geometry.geometry",
    "singular values of the representations, not centred, largest first; the curve shows shares of the largest",
    "curve",
    digits=4,
)
LOSS = Metric(
    "loss",
    "training loss",
    "atoll.engines.server.Server.run_round",
    "mean loss of the round's training steps, over clients",
    "curve",
    better="lower",
)
BYTES_UP, BYTES_DOWN = (
    Metric(
        f"bytes_{way}",
        heading,
        "atoll.engines.server.Server._fold_updates",
        meaning,
        "curve",
        "MB per round",
        "lower",
        digits=2,
        factor=1e-6,
    )
    for way, heading, meaning in (
        ("up", "upload", "size of all clients' updates of the round"),
        ("down", "download", "size of all messages that were sent to clients of the round"),
    )
)


def _measure(key: str, heading: str, function: str, meaning: str, **rest: Any) -> Metric:
    return Metric(key, heading, f"atoll.{function}", meaning, "curve", **rest)


_OBSERVER = "engines.observer.Observer.close"
MEASURES: tuple[Metric, ...] = (  # keys in the "measures" of a round's line of metrics
    _measure("norms/h", "‖h‖", _OBSERVER, "mean norm of the held-out images' representations"),
    _measure("norms/z", "‖z‖", _OBSERVER, "mean norm of their embeddings, before any normalisation"),
    _measure(
        "layers/mean",
        "layers' cosine, mean",
        "components.messages.UpdateGeometry.cosine",
        "mean over layers and clients of the cosine between a local model's layer and the received one",
    ),
    _measure(
        "layers/lowest",
        "layers' cosine, lowest",
        "components.messages.UpdateGeometry.cosine",
        "the same of the layer with the lowest mean over clients",
    ),
    _measure(
        "distances/global",
        "distance local–global",
        "functional.weight_distance",
        "mean over clients of Σ_l ‖w_k^(l) − w^(l)‖, w the model that results from the round",
    ),
    _measure(
        "distances/clients",
        "distance local–local",
        "functional.weight_distance",
        "mean over pairs of clients of Σ_l ‖w_j^(l) − w_k^(l)‖",
    ),
    _measure(
        "angles/mean",
        "angle, mean",
        "functional.representation_angle",
        "mean angle between two local models' representations of a held-out image",
        unit="°",
        digits=1,
    ),
    *(
        _measure(
            f"angles/p{p}",
            f"angle, {p} %",
            "functional.representation_angle",
            f"{p}th percentile of these angles",
            unit="°",
            digits=1,
        )
        for p in PERCENTILES
    ),
    _measure(
        "consensus/distance",
        "consensus distance",
        "functional.consensus_distance",
        "root mean square distance of the clients' models from their mean",
    ),
    _measure(
        "consensus/gap",
        "spectral gap",
        "functional.spectral_gap",
        "spectral gap of the round's mixing weights",
    ),
)

METRICS: tuple[Metric, ...] = (
    KNN,
    _accuracy("probe", _PROBE, "accuracy of the linear probe that `evaluation.probe` names"),
    *(
        _accuracy(name, _PROBE, f"accuracy of the linear probe `{probe.name}`")
        for name, probe in PAPERS_PROBES.items()
    ),
    *(metric for protocol in (*CLASSIFIERS, "classifier") for metric in _client_accuracies(protocol)),
    *(
        _accuracy(name, _FINE_TUNE, f"accuracy after fine-tuning with {one.labelled}")
        for name, one in FINE_TUNES.items()
    ),
    _accuracy(
        "classifier",
        "atoll.evaluation.classifier.classifier_accuracy",
        "accuracy of the classifier that the objective trains, end to end",
    ),
    _geometry(
        "uniformity",
        "−uniformity",
        "uniformity",
        "−log mean_{i<j} exp(−2 ‖ĥ_i − ĥ_j‖²) over normalised representations; stored without the minus sign",
        place="results",
        factor=-1.0,
    ),
    _geometry(
        "effective_rank",
        "effective rank",
        "effective_rank",
        "exp(−Σ p_i log p_i), p_i = σ_i / Σσ, of the representations, not centred",
        place="results",
        digits=1,
    ),
    ALIGNMENT,
    *(
        _geometry(
            f"clients_uniformity{part}",
            heading,
            "uniformity_decomposition",
            f"−uniformity of the clients' training images{meaning}",
            place="geometry",
            factor=-1.0,
        )
        for part, heading, meaning in (
            ("", "−uniformity, training images", ""),
            ("_intra", "within clients", ", over pairs of one client's images"),
            ("_inter", "between clients", ", over pairs of two clients' images"),
        )
    ),
    SINGULAR_VALUES,
    LOSS,
    BYTES_UP,
    BYTES_DOWN,
    *MEASURES,
)
_KEYS = {metric.key for metric in METRICS}


def measured(results: Iterable[Mapping[str, Any]], place: str = "results") -> list[Metric]:
    """The metrics of a place that at least one result has: the columns of its table, in the order of `METRICS`.

    Measurements by the user's code come after them, then accuracies of protocols that only another version knows.
    """
    found = [(key, value) for result in results for key, value in result.items()]
    keys = {key for key, _ in found}
    known = [metric for metric in METRICS if metric.place == place and metric.key in keys]
    if place != "results":
        return known
    own = [
        _own(key, [value for one, value in found if one == key])
        for key in sorted({key for key, value in found if _is_own(key, value)})
    ]
    foreign = [key for key in sorted(keys - _KEYS) if key.endswith(ACCURACY) and not names_code(key)]
    return [*known, *_told_apart(own), *(_accuracy(key.removesuffix(ACCURACY), "", "") for key in foreign)]


def _is_own(key: str, value: object) -> bool:
    """Whether a value was measured by the user's code; whole numbers and texts are constants of its protocol."""
    return names_code(key) and (key.endswith("accuracy") or isinstance(value, float))


def _own(key: str, values: list[Any]) -> Metric:
    """A measurement by the user's code, under the function's name, with 3 significant digits of the largest."""
    protocol, _, name = key.rpartition("/")
    function = protocol.partition(":")[2]
    meaning = f"`{name}` of `{protocol}`"
    if name.endswith("accuracy"):
        heading = function if name == "accuracy" else f"{function}, {name}"
        return Metric(key, heading, protocol, meaning, "results", "%", "higher", 2, 100.0)
    metric = Metric(key, f"{function}, {name}", protocol, meaning, "results")
    largest = max(map(abs, metric.values({key: value} for value in values)), default=0.0)
    digits = 2 - math.floor(math.log10(largest)) if largest else 0
    return replace(metric, digits=min(max(metric.digits, digits), _MOST_DIGITS))


def _told_apart(own: list[Metric]) -> list[Metric]:
    """Put the module's name before headings that another metric has, too."""
    headings = [metric.heading.casefold() for metric in (*METRICS, *own)]
    return [
        metric
        if headings.count(metric.heading.casefold()) == 1
        else replace(metric, heading=f"{metric.function.partition(':')[0]}:{metric.heading}")
        for metric in own
    ]


def constants(results: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The constants of every protocol of an evaluation, by protocol."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in results.items():
        protocol, slash, name = key.partition("/")
        is_measurement = (
            key in _KEYS
            or (name in ("accuracy", "last_accuracy", "epoch") and not names_code(key))
            or isinstance(value, list)
            or _is_own(key, value)
        )
        if slash and not is_measurement:
            found.setdefault(protocol, {})[name] = value
    return found
