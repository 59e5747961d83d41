import pytest
import torch

from tests.functional import oracles
from tests.rounds import Rounds
from tests.steps import Steps

MOCO = ("method.name=fed_moco", "options.moco.queue=30")


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_local_loss_contrasts_with_keys_and_queue(symmetric):
    steps = Steps(*MOCO, f"options.moco.symmetric={str(symmetric).lower()}")
    queue = steps.client.context.of(steps.client.method.objective).queue.clone()
    batch = steps.batch()
    loss = steps.client.step(batch)
    z1, z2 = (steps.encode(batch.images[view])[1] for view in ("view1", "view2"))
    pairs = [(z1, z2), (z2, z1)] if symmetric else [(z1, z2)]
    expected = sum(oracles.queue_contrast(q.double(), k.double(), queue.double(), 0.2) for q, k in pairs)
    assert loss.item() == pytest.approx(expected, rel=1e-4)


def test_the_queue_holds_directions_and_the_newest_keys_last():
    steps = Steps(*MOCO)
    scope = steps.client.context.of(steps.client.method.objective)
    torch.testing.assert_close(scope.queue.norm(dim=1), torch.ones(30))
    before = scope.queue.clone()
    batch = steps.batch()
    loss = steps.client.step(batch)
    z = torch.cat(scope.keys)  # 20 keys of each view: more than the queue takes
    steps.update(loss)
    assert scope.queue.shape == before.shape
    torch.testing.assert_close(scope.queue, z[-30:])
    torch.testing.assert_close(scope.queue.norm(dim=1), torch.ones(30))


def test_each_step_enqueues_only_its_own_keys():
    steps = Steps(*MOCO[:1], "options.moco.queue=100")
    scope = steps.client.context.of(steps.client.method.objective)
    expected = [scope.queue.clone()]
    for _ in range(2):
        loss = steps.client.step(steps.batch())
        expected.append(torch.cat(scope.keys[-2:]))  # 20 of each view
        steps.update(loss)
    assert torch.equal(scope.queue, torch.cat(expected)[-100:])


def test_the_key_encoder_starts_as_the_query_encoder_and_follows():
    steps = Steps(*MOCO, "options.moco.momentum=0.5")
    key = steps.client.copies["moco_key"]
    start = {name: value.clone() for name, value in steps.networks.named_parameters()}
    assert all(torch.equal(value, start[name]) for name, value in key.named_parameters())
    steps.update(steps.client.step(steps.batch()))
    for name, value in key.named_parameters():
        torch.testing.assert_close(
            value, (start[name] + dict(steps.networks.named_parameters())[name].detach()) / 2
        )


def test_the_client_keeps_its_queue():
    rounds = Rounds(*MOCO)
    _, kept = rounds.train(1)
    rounds.start(1, 2, kept)
    assert torch.equal(rounds.client.context.of(rounds.method.objective).queue, kept["parts"]["moco"])
    rounds.start(2, 2)
    assert not torch.equal(rounds.client.context.of(rounds.method.objective).queue, kept["parts"]["moco"])
