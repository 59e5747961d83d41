"""Folds that secure aggregation could do: a plain sum of what each client computes alone, then one division.

BatchNorm's integer counters take the maximum, which is no sum: they would stay out.
"""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from atoll.aggregation.fedavg import FedAvg
from atoll.aggregation.loss_weighted import LossWeighted
from atoll.methods.ldawa import LDAWA, MDAWA
from tests.folds import copies, fold, model

ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-12}


def cosines(g, w):
    """δ of each tensor, and of all as one vector; a client has both models."""
    inner = {name: float((g[name].double() * w[name].double()).sum()) for name in g}
    squares = [{name: float(m[name].double().square().sum()) for name in g} for m in (g, w)]
    layers = {name: inner[name] / math.sqrt(squares[0][name] * squares[1][name]) for name in g}
    whole = sum(inner.values()) / math.sqrt(sum(squares[0].values()) * sum(squares[1].values()))
    return layers, dict.fromkeys(g, whole)


def one(g, w, numbers):
    return dict.fromkeys(g, 1.0)


# A client's factor and its share of the normaliser, by tensor, from the model it was sent, its own and its numbers.
def samples(g, w, numbers):
    return (dict.fromkeys(g, numbers["samples"]),) * 2


def uniform(g, w, numbers):
    return (one(g, w, numbers),) * 2


def loss(g, w, numbers):
    return (dict.fromkeys(g, math.exp(-numbers["loss"])),) * 2


def layers(g, w, numbers):
    return cosines(g, w)[0], one(g, w, numbers)


def layers_by_samples(g, w, numbers):
    n = numbers["samples"]
    return {name: n * delta for name, delta in cosines(g, w)[0].items()}, dict.fromkeys(g, n)


def layers_renormalised(g, w, numbers):
    deltas = cosines(g, w)[0]
    return deltas, {name: abs(delta) for name, delta in deltas.items()}


def whole(g, w, numbers):
    return cosines(g, w)[1], one(g, w, numbers)


FOLDS = [
    (FedAvg(), samples),
    (FedAvg("uniform"), uniform),
    (LossWeighted(), loss),
    (LDAWA(), layers),
    (LDAWA("samples"), layers_by_samples),
    (LDAWA(renormalise=True), layers_renormalised),
    (MDAWA(), whole),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("aggregation", "term"), FOLDS, ids=[f"{a.name}-{t.__name__}" for a, t in FOLDS])
@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 999),
    clients=st.lists(st.tuples(st.integers(1, 5000), st.floats(0, 12)), min_size=1, max_size=9),
)
def test_the_fold_is_a_sum_of_what_clients_compute_alone(aggregation, term, dtype, seed, clients):
    g = model(seed, dtype)
    models = [model(seed + 1 + k, dtype) for k in range(len(clients))]
    numbers = [dict(zip(("samples", "loss"), retained, strict=True)) for retained in clients]
    names = [name for name, tensor in g.items() if tensor.is_floating_point()]
    sent = {name: g[name] for name in names}
    total = {name: torch.zeros_like(g[name], dtype=torch.float64) for name in names}
    normaliser = dict.fromkeys(names, 0.0)
    for weights, retained in zip(models, numbers, strict=True):
        factor, share = term(sent, {name: weights[name] for name in names}, retained)
        for name in names:
            total[name] += factor[name] * weights[name].double()
            normaliser[name] += share[name]
    # Models that are almost orthogonal to the global one have no more than the rounding of their cosines to share.
    assume(term is not layers_renormalised or min(normaliser.values()) > 0.02 * len(clients))
    statistics = {key: [retained[key] for retained in numbers] for key in ("samples", "loss")}
    result = fold(aggregation, g, copies(models), **statistics)
    for name in names:
        expected = total[name] / normaliser[name]
        torch.testing.assert_close(
            result[name].double(), expected, rtol=ROUNDING[dtype], atol=ROUNDING[dtype]
        )
