"""Any objective with any term, merge, aggregation and server step: two finite rounds, or a refusing sentence."""

import itertools
import re
import shutil

import pytest
import torch

from atoll.components.base import Trained
from atoll.core.errors import UserError
from atoll.core.tree import leaves
from atoll.data.sources import load_data
from atoll.engines.federation import Federation
from atoll.engines.server import Server
from atoll.methods.registry import AGGREGATIONS, MERGES, OBJECTIVES, SERVER_STEPS, TERMS
from tests.harness import run_federation, tiny

AXES = {
    "objective": sorted(OBJECTIVES),
    "terms": ["", *sorted(TERMS), "hsd:mask"],  # what stands behind a colon is for NEEDS alone
    "merge": sorted(MERGES),
    "aggregation": sorted(AGGREGATIONS),
    "server": sorted(SERVER_STEPS),
}
SMALL = (
    "data.limit=36",
    "partition.clients=3",
    "train.batch_size=6",
    "train.optimizer=sgd",
    "train.momentum=0",
    "train.lr=0.001",
    "train.norm_factor=1000",  # steps so small that a merge alone moves a client by more than ten of them
    "train.first_norm=100000",  # SCAFFOLD sends gradients, and VICReg's first ones are in the thousands
)
# What a component cannot do without on so few clients and images; it would be refused whatever stands beside it.
VIT = (
    "model.encoder=vit-tiny", "model.stem=cifar", "model.width=64", "model.depth=1",
    "model.decoder_depth=1", "model.patch=2",
)  # fmt: skip
NEEDS = {
    "mae": VIT,
    "mar": VIT,
    "hsd:mask": ("options.hsd.kind=mask",),
    "fedca_alignment": ("options.fedca_alignment.data={source='digits'}",),
    "orchestra": ("options.orchestra.server_steps=20",),
    "multi_krum": ("options.multi_krum.byzantine=0",),
    "private_fedavg": ("train.bn_buffers=leave",),
    "secure_sum": ("train.bn_buffers=leave",),
}  # fmt: skip

BESIDE = {"per_ssfl": {"merge": "personal_networks"}}  # the term trains the networks of this merge


def pairwise(axes):
    """Combinations in which any two values of any two axes meet; greedy, and the same every time."""
    names = list(axes)
    missing = {
        ((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x in axes[a] for y in axes[b]
    }
    chosen = []
    while missing:
        (a, x), (b, y) = min(missing)
        row = {a: x, b: y}
        for name in names:
            if name not in row:
                row[name] = max(
                    axes[name],
                    key=lambda value, row=row, name=name: (
                        sum(_pair(names, name, value, other, row[other]) in missing for other in row),
                        value,
                    ),
                )
        missing -= {((a, row[a]), (b, row[b])) for a, b in itertools.combinations(names, 2)}
        chosen.append(tuple(row[name] for name in names))
    return chosen


def _pair(names, name, value, other, known):
    pair = [(name, value), (other, known)]
    return tuple(sorted(pair, key=lambda item: names.index(item[0])))


@pytest.fixture(scope="module")
def images():
    """The same few digits for all."""
    return load_data(tiny(*SMALL).data, 0)


def settings_of(objective, term, merge, aggregation, server):
    settings = [f"method.objective={objective}", f"method.merge={merge}", f"method.aggregation={aggregation}"]
    terms = [term.partition(":")[0]] if term else []
    settings += [f"method.server={server}", f"method.terms={terms}"]
    for component in (objective, term, aggregation):
        settings += NEEDS.get(component, ())
    return settings


def prepare(combination, images):
    """All that comes before the first round, where a combination may be refused."""
    return set_up(tiny(*SMALL, "method.name=fed_simclr", *settings_of(*combination)), images)


def set_up(recipe, images):
    federation = Federation(recipe, images)
    trained = {
        name: Trained(federation.initial_weights(), images.test.images)
        for name in recipe.composed.prerequisites()
    }
    Server(federation.recipe, federation.setting, federation.initial_weights(), trained)
    return federation, trained


def play(federation, trained, folder):
    """Two rounds; what the server ends with."""
    return run_federation(federation, folder, prerequisites=trained)


def check(combination, images, folder):
    try:
        prepared = prepare(combination, images)
    except UserError as refusal:
        sentence = str(refusal)
        assert len(sentence) > 20
        assert not re.search(r"Traceback|object at 0x|None", sentence)
        return
    server = play(*prepared, folder)  # once a round has begun, a refusal comes too late
    assert server.round == 2
    assert all(torch.isfinite(tensor).all() for tensor in leaves(server.state) if tensor.is_floating_point())


def test_pairwise_meets_every_pair():
    axes = {"a": ["1", "2", "3"], "b": ["x", "y"], "c": ["p", "q"]}
    rows = pairwise(axes)
    names = list(axes)
    for a, b in itertools.combinations(range(3), 2):
        assert {(row[a], row[b]) for row in rows} == set(itertools.product(axes[names[a]], axes[names[b]]))
    assert len(rows) < 12


def some_of_them_slow(combinations):
    """Every third is tested always, and all are by the slow tests."""
    return [
        pytest.param(one, marks=[pytest.mark.slow] if number % 3 else [])
        for number, one in enumerate(combinations)
    ]


@pytest.mark.parametrize("combination", some_of_them_slow(pairwise(AXES)), ids="-".join)
def test_any_two_parts_work_together_or_are_refused(combination, images, tmp_path):
    check(combination, images, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("objective", AXES["objective"])
def test_any_two_parts_work_with_every_objective(objective, images, tmp_path):
    """So any three parts of which one is the objective; all combinations would take days."""
    others = {axis: values for axis, values in AXES.items() if axis != "objective"}
    for number, rest in enumerate(pairwise(others)):
        folder = tmp_path / str(number)
        check((objective, *rest), images, folder)
        shutil.rmtree(folder, ignore_errors=True)


PLAIN = {"objective": "simclr", "terms": "", "merge": "replace", "aggregation": "fedavg", "server": "direct"}


@pytest.mark.parametrize("axis", AXES)
def test_each_part_works_beside_plain_ones(axis, images, tmp_path):
    """A matrix of refusals would prove nothing."""
    for value in AXES[axis]:
        combination = tuple({**PLAIN, axis: value, **BESIDE.get(value, {})}.values())
        assert play(*prepare(combination, images), tmp_path / (value or "none")).round == 2, value
