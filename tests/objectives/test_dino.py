import math

import pytest
import torch
from torch.nn.functional import normalize

from atoll.core.errors import UserError
from tests.functional import oracles
from tests.rounds import Rounds
from tests.steps import Steps, federation
from tests.trees import same

DINO = (
    "method.name=fed_dino",
    "options.dino.prototypes=24",
    "options.dino.local_crops=2",
    "model.projector_dim=6",
)


def head(networks, z):
    """Cosines of rows and prototypes, in float64."""
    return normalize(z.double()) @ normalize(networks["prototypes"].weight.detach().double()).T


def test_the_local_loss_is_the_equation_on_all_crops():
    steps = Steps(*DINO, "options.dino.warmup_temperature=0.2", "views.local_size=6")
    batch = steps.batch()
    assert batch.images["local1"].shape[2:] == (6, 6)
    loss = steps.client.step(batch)
    globals_ = [steps.encode(batch.images[view])[1] for view in ("view1", "view2")]
    local = steps.encode(torch.cat([batch.images["local1"], batch.images["local2"]]))[1]  # one batch
    student = torch.stack([head(steps.networks, z) for z in (*globals_, *local.chunk(2))])
    # Before the first step the teacher is a copy of the student, and both are in train mode.
    expected = oracles.dino(student, student[:2], torch.zeros(24), 0.1, 0.2)
    assert loss.item() == pytest.approx(expected, rel=1e-3)


def test_the_centre_is_the_moving_mean_of_the_teachers_outputs():
    steps = Steps(*DINO, "options.dino.momentum=0.5")
    scope = steps.client.context.of(steps.client.method.objective)
    for _ in range(2):
        before, batch = scope.centre.clone(), steps.batch()
        loss = steps.client.step(batch)
        copy = {
            name: value.clone() for name, value in steps.client.copies["dino_teacher"].state_dict().items()
        }
        z = [
            steps.encode(batch.images[view], steps.client.copies["dino_teacher"])[1]
            for view in ("view1", "view2")
        ]
        mean = head(steps.client.copies["dino_teacher"], torch.cat(z)).mean(dim=0)
        steps.client.copies["dino_teacher"].load_state_dict(copy)
        steps.update(loss)
        torch.testing.assert_close(scope.centre.double(), 0.9 * before + 0.1 * mean, atol=1e-4, rtol=1e-4)
    assert scope.centre.abs().max() > 0


def test_momentum_and_temperature_follow_their_schedules():
    options = (*DINO, "train.rounds=8", "options.dino.warmup_rounds=4")
    for round in (1, 2, 5, 8):
        steps = Steps(*options, round=round)
        scope = steps.client.context.of(steps.client.method.objective)
        momentum = 1 - (1 - 0.996) * (math.cos(math.pi * (round - 1) / 8) + 1) / 2
        assert scope.momentum == pytest.approx(momentum, abs=1e-12)
        assert scope.temperature == pytest.approx(0.04 + 0.03 * min((round - 1) / 4, 1))
    without = Steps(*DINO, "options.dino.warmup_rounds=0")
    assert without.client.context.of(without.client.method.objective).temperature == 0.07


def test_the_teacher_follows_the_parameters_after_each_step():
    steps = Steps(*DINO, "options.dino.momentum=0.75", "options.dino.fixed_epochs=0")
    teacher = steps.client.copies["dino_teacher"]
    steps.update(steps.client.step(steps.batch()))
    before = {name: value.clone() for name, value in teacher.named_parameters()}
    steps.update(steps.client.step(steps.batch()))
    online = dict(steps.networks.named_parameters())
    for name, value in teacher.named_parameters():
        torch.testing.assert_close(value, 0.75 * before[name] + 0.25 * online[name])


def test_teacher_and_centre_are_taken_up_again_or_the_centre_alone():
    rounds = Rounds(*DINO)
    _, kept = rounds.train(0)
    slot = kept["parts"]["dino"]
    assert {name.partition(".")[0] for name in slot["teacher"]} == {"encoder", "projector", "prototypes"}
    rounds.start(0, 2, kept)
    teacher = rounds.client.copies["dino_teacher"].state_dict()
    assert all(torch.equal(teacher[name], value) for name, value in slot["teacher"].items())
    assert torch.equal(rounds.client.context.of(rounds.method.objective).centre, slot["centre"])

    anew = Rounds(*DINO, "options.dino.target=reset")
    _, kept = anew.train(0)
    assert kept["parts"]["dino"].keys() == {"centre"}
    online = anew.start(0, 2, kept)
    assert same(dict(anew.client.copies["dino_teacher"].state_dict()), online)
    assert torch.equal(anew.client.context.of(anew.method.objective).centre, kept["parts"]["dino"]["centre"])
    assert anew.method.keeps == ("the mean of its teacher's outputs",)


def test_without_local_crops_there_are_two_views():
    steps = Steps(*DINO, "options.dino.local_crops=0")
    batch = steps.batch()
    loss = steps.client.step(batch)
    assert batch.images.keys() == {"view1", "view2"}
    student = torch.stack(
        [head(steps.networks, steps.encode(batch.images[v])[1]) for v in ("view1", "view2")]
    )
    assert loss.item() == pytest.approx(oracles.dino(student, student, torch.zeros(24), 0.1, 0.04), rel=1e-3)


def test_an_encoder_that_cannot_process_the_crops_is_refused():
    vit = ("model.encoder=vit-tiny", "model.stem=cifar", "model.width=64", "model.depth=1", "model.patch=4")
    federation(*DINO, *vit, "views.local_size=4")  # its position embeddings are interpolated
    with pytest.raises(UserError, match=r"local crops of side 1 .*; set views.local_size"):
        federation(*DINO, *vit, "views.local_size=1", "views.pad_crop=0")
    with pytest.raises(UserError, match=r"local crops of side 5 .*multiples of 4.*; set views.local_size"):
        federation(*DINO, *vit, "views.local_size=5")
