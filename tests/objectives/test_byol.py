import pytest
import torch

from tests.functional.oracles import mean_cosine
from tests.rounds import Rounds
from tests.steps import Steps
from tests.trees import same

BYOL = ("method.name=fed_byol", "model.predictor_hidden=[16]")


def test_the_local_loss_predicts_each_view_from_the_other():
    steps = Steps(*BYOL)
    batch = steps.batch()
    loss = steps.client.step(batch)
    with torch.no_grad():
        z1, z2 = (steps.encode(batch.images[view])[1] for view in ("view1", "view2"))
        q1, q2 = (steps.networks["predictor"](z) for z in (z1, z2))
    # Before the first step the target is a copy of the online network, and both are in train mode.
    expected = sum(2 - 2 * mean_cosine(q, z) for q, z in ((q1, z2), (q2, z1)))
    assert loss.item() == pytest.approx(float(expected), rel=1e-4)


def test_the_target_follows_the_parameters_after_each_step_and_nothing_else():
    steps = Steps(*BYOL, "options.byol.momentum=0.75")
    target = steps.client.copies["byol_target"]
    steps.update(steps.client.step(steps.batch()))
    statistics = {name: value.clone() for name, value in target.named_buffers()}
    before = {name: value.clone() for name, value in target.named_parameters()}
    steps.update(steps.client.step(steps.batch()))
    online = dict(steps.networks.named_parameters())
    for name, value in target.named_parameters():
        assert not value.requires_grad
        torch.testing.assert_close(value, 0.75 * before[name] + 0.25 * online[name])
    # The target's statistics come from its own passes: each of the two moved them once more.
    counter = "encoder.bn1.num_batches_tracked"
    assert dict(target.named_buffers())[counter] == statistics[counter] + 2
    assert dict(target.named_buffers())[counter] == steps.networks.state_dict()[counter]


def test_no_gradient_reaches_the_target():
    steps = Steps(*BYOL)
    steps.client.step(steps.batch()).backward()
    assert all(p.grad is None for p in steps.client.copies["byol_target"].parameters())
    assert all(p.grad is not None for p in steps.networks.parameters())


def test_a_kept_target_is_taken_up_again_and_a_reset_one_is_not():
    rounds = Rounds(*BYOL)
    _, kept = rounds.train(0)
    rounds.start(0, 2, kept)
    target = rounds.client.copies["byol_target"].state_dict()
    assert {name.partition(".")[0] for name in kept["parts"]["byol"]} == {"encoder", "projector"}
    assert all(torch.equal(target[name], value) for name, value in kept["parts"]["byol"].items())

    anew = Rounds(*BYOL, "options.byol.target=reset")
    _, nothing = anew.train(0)
    online = anew.start(0, 2)
    assert nothing is None
    assert anew.method.keeps == ()
    assert same(dict(anew.client.copies["byol_target"].state_dict()), online)
