"""The one table of measurements."""

import pkgutil

import pytest
import torch

from atoll.evaluation import PROTOCOLS, geometry
from atoll.evaluation.client_tests import summary
from atoll.evaluation.metrics import MEASURES, METRICS, constants, measured

KEYS = [metric.key for metric in METRICS]


def test_each_key_and_each_heading_stands_once():
    assert len(set(KEYS)) == len(KEYS)
    assert len({metric.title for metric in METRICS}) == len(METRICS)


@pytest.mark.parametrize("metric", METRICS, ids=KEYS)
def test_what_is_printed_is_what_the_heading_says(metric):
    """Percent of a share, megabytes of bytes, the negative of what has a minus sign, and nothing else."""
    factor = {"%": 100.0, "MB per round": 1e-6}.get(metric.unit, 1.0)
    sign = -1 if metric.meaning.startswith("−") else 1
    assert metric.values([{metric.key: 0.75}, {metric.key: float("nan")}, {}]) == [sign * factor * 0.75]
    assert metric.title == {
        "": metric.heading,
        "%": f"{metric.heading} %",
    }.get(metric.unit, f"{metric.heading}, {metric.unit}")


@pytest.mark.parametrize("metric", METRICS, ids=KEYS)
def test_the_function_that_makes_a_metric_exists(metric):
    assert callable(pkgutil.resolve_name(metric.function))
    assert metric.meaning


def test_everything_that_is_measured_stands_in_the_table():
    h = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    found = geometry(h, views=(h, h + 0.1), clients=(h, torch.arange(12) % 3))
    made = {f"geometry/{name}" for name in found}
    made |= {f"{protocol}/accuracy" for protocol in PROTOCOLS if protocol != "geometry"}
    made |= {
        f"{protocol}/{name}"
        for protocol in (*PROTOCOLS, "clients-classifier")
        if protocol.startswith("clients-")
        for name in summary([1.0], [1])
    }
    made |= {"classifier/accuracy", "loss", "bytes_up", "bytes_down"}
    assert made == set(KEYS) - {metric.key for metric in MEASURES}


def test_printed_values():
    results = [{"knn/accuracy": 0.25, "geometry/uniformity": -1.5}, {"knn/accuracy": float("nan")}, {}]
    knn, uniformity = measured(results)
    assert (knn.title, knn.values(results)) == ("kNN %", [25.0])
    assert (uniformity.title, uniformity.values(results)) == ("−uniformity", [1.5])
    assert knn.values([{"knn/accuracy": True}]) == []


def test_an_accuracy_of_another_version_is_shown_last():
    results = [{"probe-of-tomorrow/accuracy": 0.5, "geometry/uniformity": -1.0}]
    titles = [metric.title for metric in measured(results)]
    assert titles == ["−uniformity", "probe-of-tomorrow %"]


def test_constants_are_what_is_no_measurement():
    results = {
        "split": "test",
        "knn/accuracy": 0.5,
        "knn/k": 20,
        "probe/epoch": 3,
        "probe/last_accuracy": 0.1,
        "geometry/singular_values": [1.0],
        "geometry/clients_uniformity_intra": -1.0,
        "geometry/t": 2.0,
    }
    assert constants(results) == {"knn": {"k": 20}, "geometry": {"t": 2.0}}


def test_floats_of_the_users_protocols_are_measurements_and_the_rest_constants():
    results = {
        "knn/accuracy": 0.5,
        "mine:m/nmi": 0.25,
        "mine:m/top_accuracy": 1,
        "mine:m/k": 10,
        "mine:m/kind": "x",
    }
    assert constants(results) == {"mine:m": {"k": 10, "kind": "x"}}
    _, nmi, top = measured([results])
    assert (nmi.title, nmi.values([results]), nmi.better) == ("m, nmi", [0.25], "")
    assert (top.title, top.values([results]), top.better) == ("m, top_accuracy %", [100.0], "higher")
    assert measured([results], "geometry") == []


def test_any_float_makes_a_measurement_of_what_another_run_gives_as_a_whole_number():
    results = [{"mine:m/nmi": 0.25}, {"mine:m/nmi": 0}]
    for some in (results, results[::-1]):
        (nmi,) = measured(some)
        assert sorted(nmi.values(some)) == [0.0, 0.25]


def test_each_name_may_be_a_constant_of_the_users_protocol():
    assert constants({"mine:m/epoch": 4}) == {"mine:m": {"epoch": 4}}


def test_headings_of_the_users_protocols_are_told_apart():
    keys = ("probe/accuracy", "mine:probe/accuracy", "mine:m/nmi", "other.part:m/nmi", "mine:KNN/accuracy")
    titles = [metric.title for metric in measured([dict.fromkeys(keys, 0.5)])]
    assert titles == ["probe %", "mine:KNN %", "mine:m, nmi", "mine:probe %", "other.part:m, nmi"]


@pytest.mark.parametrize(
    ("values", "digits"),
    [((0.25, 0.001), 3), ((-250.0,), 3), ((0.05,), 4), ((-1.5e-7, 1e-9), 9), ((0.0,), 3), ((1e-200,), 12)],
)
def test_small_measurements_of_the_users_protocols_do_not_round_to_zero(values, digits):
    (metric,) = measured([{"mine:m/loss": value} for value in values])
    assert metric.digits == digits
