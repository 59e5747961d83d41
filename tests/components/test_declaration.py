"""One declaration: what fits it is accepted, and what differs from it in one place is refused."""

import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.aggregation.fedavg import FedAvg
from atoll.components.base import (
    ChoiceSpec,
    NumberSpec,
    Optional,
    PerWeight,
    TensorSpec,
    Term,
    UpTo,
)
from atoll.components.declaration import declared_leaves, max_bytes, mismatch
from atoll.core.tree import clone, leaves, num_bytes, pack, unpack
from atoll.engines.update_checks import UpdateChecks, max_update_size
from atoll.methods.method import Method
from atoll.objectives.simclr import SimCLR
from tests.folds import model, setting
from tests.rounds import Rounds
from tests.steps import federation

WEIGHTS = model(0)
DTYPES = [torch.float32, torch.float64, torch.int64, torch.uint8]
names = st.text("abcdefgh.é", min_size=1, max_size=5)
sizes = st.integers(1, 4)

tensors = st.builds(
    TensorSpec,
    st.lists(sizes | st.builds(UpTo, sizes), max_size=3).map(tuple),
    st.sampled_from(DTYPES),
    least=st.sampled_from([-math.inf, 0.0, 2.0]),
    most=st.sampled_from([math.inf, 5.0]),
)
rows = st.builds(TensorSpec, st.tuples(st.builds(UpTo, sizes), sizes), unit_rows=st.just(True))
numbers = st.builds(NumberSpec, st.sampled_from([int, float]), least=st.just(-3), most=st.just(7))
chosen = st.text("abcdefgh.é", min_size=1, max_size=20)
words = st.builds(ChoiceSpec, st.lists(chosen, min_size=1, max_size=3, unique=True).map(tuple))
per_weight = st.sampled_from(
    [
        PerWeight(),
        PerWeight(without=frozenset({"conv.bias"})),
        PerWeight(NumberSpec(float), some=True, min_dims=1),
    ]
)
plain = tensors | rows | numbers | words | per_weight
specs = plain | plain.map(Optional) | st.dictionaries(names, plain, max_size=3) | st.tuples(plain, plain)


def entries(spec):
    """The entries of a table."""
    if not isinstance(spec, PerWeight):
        return spec
    chosen = {n: t for n, t in WEIGHTS.items() if n not in spec.without and t.ndim >= spec.min_dims}
    return {n: spec.each or TensorSpec(tuple(t.shape), t.dtype) for n, t in chosen.items()}


def fit(spec, draw):
    """A value that fits."""
    if isinstance(spec, Optional):
        return draw(st.none()) if draw(st.booleans()) else fit(spec.spec, draw)
    if isinstance(spec, TensorSpec):
        shape = [draw(st.integers(1, size.most)) if isinstance(size, UpTo) else size for size in spec.shape]
        if spec.unit_rows:
            return torch.nn.functional.normalize(torch.rand(shape) + 0.1, dim=-1)
        return torch.full(shape, draw(st.sampled_from([2, 3, 5])), dtype=spec.dtype)
    if isinstance(spec, NumberSpec):
        return spec.kind(draw(st.sampled_from([spec.least, 0, spec.most])) if spec.most < 1e9 else 1)
    if isinstance(spec, ChoiceSpec):
        return draw(st.sampled_from(spec.words))
    if isinstance(spec, tuple):
        return [fit(one, draw) for one in spec]
    table = {name: fit(one, draw) for name, one in entries(spec).items()}
    if isinstance(spec, PerWeight) and spec.some:
        table.pop(draw(st.sampled_from([None, *table])), None)
    return table


def deviations(spec, value):
    """Values that differ from a fitting one in one name, shape, dtype or range."""
    if isinstance(spec, Optional):
        return (
            [object()] if value is None else [bad for bad in deviations(spec.spec, value) if bad is not None]
        )
    if isinstance(spec, TensorSpec):
        made = [None, 1.0, value.tolist(), value[None], value.to(torch.float16), {"x": value}]
        for dim, size in enumerate(spec.shape):
            most = size.most if isinstance(size, UpTo) else size
            made.append(torch.cat([value] * (most + 1), dim))
            made.append(value.narrow(dim, 0, 0))
        if spec.least > -math.inf:
            made.append(
                torch.full_like(value, spec.least - 1) if spec.dtype != torch.uint8 or spec.least else None
            )
        if spec.most < math.inf:
            made.append(torch.full_like(value, spec.most + 1))
        return made + ([2 * value, 0 * value, value * math.nan] if spec.unit_rows else [])
    if isinstance(spec, NumberSpec):
        other = float if spec.kind is int else int
        return [None, other(value), True, "1", spec.kind(spec.most * 2), spec.kind(spec.least * 2), math.nan]
    if isinstance(spec, ChoiceSpec):
        return [None, "other", 0, [value]]
    if isinstance(spec, tuple):
        places = [(k, bad) for k, one in enumerate(spec) for bad in deviations(one, value[k])]
        nested = [[*value[:k], bad, *value[k + 1 :]] for k, bad in places]
        return [*nested, None, value[:-1], [*value, value[0]], dict(enumerate(value))]
    named = entries(spec)
    nested = [{**value, name: bad} for name in value for bad in deviations(named[name], value[name])]
    optional = isinstance(spec, PerWeight) and spec.some
    less = [] if optional else [{n: v for n, v in value.items() if n != gone} for gone in value]
    less = [
        table
        for table in less
        if any(not isinstance(named[n], Optional) for n in value.keys() - table.keys())
    ]
    return [*nested, *less, None, [], {**value, "unheard of": torch.zeros(2)}]


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_what_fits_is_accepted_and_every_deviation_is_refused_in_a_sentence(data):
    spec = data.draw(specs)
    value = fit(spec, data.draw)
    assert mismatch(spec, value, WEIGHTS, "its slice") is None
    for bad in deviations(spec, value):
        sentence = mismatch(spec, bad, WEIGHTS, "its slice")
        assert sentence, bad
        assert "its slice" in sentence
        assert "\n" not in sentence


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_nothing_that_fits_is_larger_than_the_bound(data):
    spec = data.draw(specs)
    value = fit(spec, data.draw)
    assert len(pack(value)) <= max_bytes(spec, WEIGHTS) + 512
    assert num_bytes(value) <= max_bytes(spec, WEIGHTS)
    listed = [leaf for _, leaf in declared_leaves(spec, WEIGHTS, "x")]
    assert num_bytes(value) <= sum(leaf.num_bytes for leaf in listed)
    assert len(list(leaves(value))) <= sum(isinstance(leaf, TensorSpec) for leaf in listed)


@dataclass(frozen=True)
class Sending(Term):
    """Declares a mean and a count."""

    name: ClassVar[str] = "sending"
    egress: ClassVar[tuple[str, ...]] = ("a mean",)

    def declares(self, setting):
        return {"mean": TensorSpec((setting.embedding_dim,)), "count": NumberSpec(int, least=1)}

    def finish(self, context):
        return None


def test_the_server_refuses_what_was_not_declared():
    method = Method(objective=SimCLR(), terms=(Sending(),))
    checks = UpdateChecks(method, setting(), frozenset(WEIGHTS))

    def examine(**slices):
        losses = {"loss": 1.0, "simclr": 1.0, "sending": 0.0}
        update = {"weights": WEIGHTS, "samples": 3, "losses": losses, "parts": slices}
        return checks.examine(update, {"global": WEIGHTS})

    good = {"mean": torch.zeros(2), "count": 1}
    assert not isinstance(examine(sending=good), str)
    assert examine() == "its slice of 'sending' is missing"
    assert examine(sending={**good, "images": torch.zeros(9)}) == (
        "its slice of 'sending' holds 'images', which was not declared"
    )
    assert (
        examine(sending={**good, "count": 0})
        == "'count' in its slice of 'sending' is 0, not an int from 1 to 1e+30"
    )
    assert examine(sending=good, simclr=1) == "it holds a slice of 'simclr', which sends none"
    infinite = {**good, "mean": torch.tensor([math.inf, 0.0])}
    assert examine(sending=infinite) == (
        "'mean' in its slice of 'sending' holds values that are not finite, or that overflow"
    )


@pytest.mark.parametrize(
    ("length", "fits"), [(1 + 9.5e-4, True), (1 - 9.5e-4, True), (1 + 1.05e-3, False), (1 - 1.05e-3, False)]
)
@pytest.mark.parametrize("place", [0, 4])
def test_rows_are_normalised_within_a_thousandth(length, fits, place):
    """A single row decides, and a row of another length cannot be made up for by the others."""
    rows = torch.nn.functional.normalize(torch.randn(5, 3, generator=torch.Generator().manual_seed(1)), dim=1)
    rows[place] *= length
    spec = TensorSpec((UpTo(9), 3), unit_rows=True)
    assert spec.mismatch(rows, "it") == (None if fits else "it holds rows that are not normalised")


def test_every_bundled_component_that_sends_a_slice_declares_it():
    from atoll.components.component import Component, declares_slice
    from atoll.methods.registry import AGGREGATIONS, MERGES, OBJECTIVES, SERVER_STEPS, TERMS

    for kinds in (AGGREGATIONS, MERGES, OBJECTIVES, SERVER_STEPS, TERMS):
        for kind in kinds.values():
            assert declares_slice(kind), kind
            assert (kind.finish is Component.finish) == (kind.declares is Component.declares), kind


SENDERS = [
    ("method.name=scaffold",),
    ("method.name=orchestra", "options.orchestra.local_clusters=4", "options.orchestra.server_steps=2"),
    ("method.name=featarc",),
    ("method.name=fedsc",),
    ("method.name=dcco",),
    ("method.name=calibre",),
    ("method.name=fed_simclr", "method.objective=fedca_dictionary", "options.fedca_dictionary.size=20"),
    ("method.name=euc",),
    ("method.name=local_only",),
    ("method.name=ssd",),
]


@pytest.mark.parametrize("recipe", SENDERS, ids=lambda recipe: recipe[0].split("=")[1])
def test_an_update_is_no_larger_than_its_method_allows(recipe):
    rounds = Rounds(*recipe)
    limit, _ = rounds.federation.max_update_size()
    retained = None
    for round in (1, 3):
        update, retained = rounds.train(0, round, retained)
        assert rounds.refused(update) is None
        assert len(pack({"update": update})) <= limit
        assert clone(unpack(pack(update))).keys() == update.keys()
    weights = sum(t.numel() * t.element_size() for t in rounds.server.state["models"].popitem()[1].values())
    assert limit <= 2 * weights + 20 * 2**10 + 2**16 + 12 * 512 * len(update["weights"])


def test_headers_have_what_the_values_of_tensors_leave_of_the_limit():
    made = federation("method.name=ssd")
    weights = made.initial_weights()
    limit = max_update_size(Method(SimCLR()), made.setting, weights)
    assert limit.total - limit.headers == sum(t.numel() * t.element_size() for t in weights.values())


def test_what_is_not_declared_has_no_limit():
    @dataclass(frozen=True)
    class Old(Sending):
        name: ClassVar[str] = "old"

        def finish(self, context):
            return torch.zeros(9)

    class Reporting(FedAvg):
        def report(self, *args):
            return {"more": 1.0}

    made = federation("method.name=ssd")
    weights = made.initial_weights()
    assert max_update_size(Method(SimCLR(), (Old(),)), made.setting, weights) is None
    assert max_update_size(Method(SimCLR(), aggregation=Reporting()), made.setting, weights) is None
    assert max_update_size(Method(SimCLR(), (Sending(),)), made.setting, weights).total > num_bytes(weights)
