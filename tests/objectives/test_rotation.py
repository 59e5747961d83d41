import math

import pytest
import torch

from atoll.core.errors import UserError
from tests.functional.oracles import log_softmax
from tests.rounds import Rounds
from tests.steps import Steps


def expected_loss(steps, rotated, turns, on="h"):
    h, z = steps.encode(rotated)
    with torch.no_grad():
        logits = steps.networks["rotation_head"](z if on == "z" else h).double().tolist()
    return -sum(log_softmax(row)[turn] for row, turn in zip(logits, turns, strict=True)) / len(turns)


def rotate(image, turns):
    """By indices: a quarter turn takes (row, column) from (column, last − row)."""
    for _ in range(turns):
        size = image.shape[-1]
        turned = torch.empty_like(image)
        for row in range(size):
            for column in range(size):
                turned[:, row, column] = image[:, column, size - 1 - row]
        image = turned
    return image


@pytest.mark.parametrize("image", ["view1", "view3", "image"])
def test_every_turn_of_every_image_is_predicted(image):
    steps = Steps("method.name=fed_pr", f"options.rotation.images_of={image}")
    batch = steps.batch()
    loss = steps.client.step(batch)
    images = batch.images[image]
    rotated = torch.stack([rotate(one, turns) for turns in range(4) for one in images])
    turns = [turns for turns in range(4) for _ in images]
    assert torch.equal(batch.images["rotation"], rotated)
    assert loss.item() == pytest.approx(expected_loss(steps, rotated, turns), rel=1e-5)


def test_one_turn_may_be_drawn_for_each_image():
    steps = Steps("method.name=fed_pr", "options.rotation.every=false", "options.rotation.on=z")
    batch = steps.batch()
    loss = steps.client.step(batch)
    rotated = batch.images["rotation"]
    assert rotated.shape == batch.images["view1"].shape
    turns = []
    for one, turned in zip(batch.images["view1"], rotated, strict=True):
        (turn,) = [t for t in range(4) if torch.equal(rotate(one, t), turned)]
        turns.append(turn)
    assert set(turns) == {0, 1, 2, 3}
    assert loss.item() == pytest.approx(expected_loss(steps, rotated, turns, "z"), rel=1e-5)


def test_a_head_that_knows_nothing_loses_ln_4():
    steps = Steps("method.name=fed_pr")
    torch.nn.init.zeros_(steps.networks["rotation_head"].weight)
    torch.nn.init.zeros_(steps.networks["rotation_head"].bias)
    assert steps.client.step(steps.batch()).item() == pytest.approx(math.log(4), abs=1e-6)


def test_beside_another_loss_it_is_the_same():
    alone = Steps("method.name=fed_pr")
    beside = Steps("method.terms=['rotation_term']", "method.name=fed_simclr")
    loss = alone.client.step(alone.batch())
    beside.client.step(beside.batch())
    losses = beside.client._losses
    assert losses["rotation_term"][0].item() == pytest.approx(loss.item(), rel=1e-6)
    assert losses["loss"][0].item() == pytest.approx(losses["simclr"][0].item() + loss.item(), rel=1e-6)


def test_an_objective_and_a_term_share_no_head_of_two_sizes():
    both = ("method.name=fed_pr", "method.terms=['rotation_term']", "model.projector_dim=24")
    words = "the head 'rotation_head' of 'rotation_term' has other sizes .* leave one of them out"
    with pytest.raises(UserError, match=words):
        Rounds(*both, "options.rotation_term.on=z")
