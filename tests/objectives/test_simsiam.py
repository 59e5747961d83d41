import pytest
import torch

from tests.functional.oracles import mean_cosine
from tests.steps import Steps

SIMSIAM = ("method.name=fed_simsiam", "model.predictor_hidden=[16]")


def test_the_local_loss_is_minus_the_mean_cosine_of_both_directions():
    steps = Steps(*SIMSIAM)
    batch = steps.batch()
    loss = steps.client.step(batch)
    with torch.no_grad():
        z1, z2 = (steps.encode(batch.images[view])[1] for view in ("view1", "view2"))
        q1, q2 = (steps.networks["predictor"](z) for z in (z1, z2))
    expected = -0.5 * (mean_cosine(q1, z2) + mean_cosine(q2, z1))
    assert loss.item() == pytest.approx(float(expected), rel=1e-4)
    assert -1 <= loss.item() <= 1


def test_no_gradient_flows_through_the_embedding_alone():
    steps = Steps(*SIMSIAM)
    for parameter in steps.networks["predictor"].parameters():
        torch.nn.init.zeros_(parameter)  # q = 0 has no direction, so only the path through z is left
    loss = steps.client.step(steps.batch())
    loss.backward()
    assert all(not p.grad.any() for p in steps.networks["projector"].parameters())
