import math

import pytest
import torch

from rounds import Rounds
from steps import Steps

MOCO = ("method.name=fed_moco", "options.moco.queue=30")


def contrast(q, k, queue, t):
    """CE([q·k, qQ]/τ, 0) in float64, row by row."""
    q, k = (torch.nn.functional.normalize(x.double()) for x in (q, k))
    losses = []
    for i in range(len(q)):
        logits = [float(q[i] @ k[i]) / t, *(float(q[i] @ row.double()) / t for row in queue)]
        losses.append(math.log(sum(map(math.exp, logits))) - logits[0])
    return sum(losses) / len(losses)


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_local_loss_contrasts_with_keys_and_queue(symmetric):
    steps = Steps(*MOCO, f"options.moco.symmetric={str(symmetric).lower()}")
    queue = steps.client.local.of(steps.client.method.objective).queue.clone()
    batch = steps.batch()
    loss = steps.client.step(batch)
    z1, z2 = (steps.encode(batch.images[view])[1] for view in ("view1", "view2"))
    expected = contrast(z1, z2, queue, 0.2) + (contrast(z2, z1, queue, 0.2) if symmetric else 0)
    assert loss.item() == pytest.approx(expected, rel=1e-4)


def test_the_queue_holds_directions_and_the_newest_keys_last():
    steps = Steps(*MOCO)
    mine = steps.client.local.of(steps.client.method.objective)
    torch.testing.assert_close(mine.queue.norm(dim=1), torch.ones(30))
    before = mine.queue.clone()
    batch = steps.batch()
    steps.update(steps.client.step(batch))
    assert mine.queue.shape == before.shape
    z = torch.cat(mine.keys)  # 20 keys of each view: more than the queue takes
    torch.testing.assert_close(mine.queue, z[-30:])
    torch.testing.assert_close(mine.queue.norm(dim=1), torch.ones(30))


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
    assert torch.equal(rounds.client.local.of(rounds.method.objective).queue, kept["parts"]["moco"])
    rounds.start(2, 2)
    assert not torch.equal(rounds.client.local.of(rounds.method.objective).queue, kept["parts"]["moco"])
