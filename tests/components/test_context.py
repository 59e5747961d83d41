"""What a client's round reads of earlier rounds: its retained state, unless it is reset, and nothing else."""

import pytest

from tests.rounds import Rounds
from tests.trees import same

MISSED = ("method.merge=fedema", "model.predictor_hidden=[16]")  # resets a client that missed a round
OBJECTIVES = {
    "byol": ("method.name=fed_byol",),
    "moco": ("method.name=fed_moco", "options.moco.queue=64"),
    "swav": (
        "method.name=fed_swav",
        "options.swav.prototypes=12",
        "options.swav.queue=40",
        "options.swav.queue_epochs=0",
    ),
    "dino": (
        "method.name=fed_dino",
        "options.dino.prototypes=12",
        "options.dino.local_crops=0",
        "options.dino.momentum=0.5",
    ),
    "orchestra": (
        "method.name=orchestra",
        "options.orchestra.global_clusters=6",
        "options.orchestra.local_clusters=4",
        "options.orchestra.memory=100",
        "options.orchestra.target=kept",
        "options.orchestra.momentum=0.5",
    ),
    "fedca_dictionary": ("method.name=fedca", "method.terms=[]", "options.fedca_dictionary.size=16"),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_client_that_is_reset_is_as_one_that_takes_part_for_the_first_time(name):
    rounds = Rounds(*OBJECTIVES[name], *MISSED)
    first, kept = rounds.train(0, 2)
    rounds.fold(2, {0: first})
    # In the next round its state counts; two rounds later its components begin anew.
    _, continued = rounds.train(0, 3, kept)
    _, fresh = rounds.train(0, 3)
    assert not same(continued["parts"][name], fresh["parts"][name])
    update, continued = rounds.train(0, 4, kept)
    expected, fresh = rounds.train(0, 4)
    assert same(update, expected)
    assert same(continued["parts"][name], fresh["parts"][name])


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_client_does_not_see_who_trained_before_it_on_the_same_networks(name):
    shared, alone = (Rounds(*OBJECTIVES[name]) for _ in range(2))
    _, kept = shared.train(1, 2)
    shared.train(1, 3, kept)
    for mine, other in zip(shared.train(0, 2), alone.train(0, 2), strict=True):
        assert same(mine, other)
