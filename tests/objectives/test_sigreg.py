import pytest
import torch
from torch.nn.functional import normalize

from atoll.core.rng import stream
from tests.functional import oracles
from tests.steps import Steps

SIGREG = (
    "method.name=fed_sigreg",
    "options.sigreg.slices=5",
    "options.sigreg.weight=0.2",
    "model.projector_dim=6",
)


def test_the_local_loss_is_the_equation_on_both_views():
    steps = Steps(*SIGREG)
    batch = steps.batch()
    loss = steps.client.step(batch)
    z1, z2 = (steps.encode(batch.images[view])[1].double() for view in ("view1", "view2"))
    seed = steps.federation.setting.seed
    slices = normalize(torch.randn(5, 6, generator=stream(seed, "sigreg", 1, 0))).double()
    agreement = 0.0
    for a, b in zip(z1.tolist(), z2.tolist(), strict=True):
        mean = [(x + y) / 2 for x, y in zip(a, b, strict=True)]
        agreement += (oracles.squared(a, mean) + oracles.squared(b, mean)) / 2 / len(mean) / len(z1)
    gaussian = sum(oracles.sigreg(z, slices, 5.0, 9) for z in (z1, z2)) / 2
    assert loss.item() == pytest.approx(0.8 * agreement + 0.2 * gaussian, rel=1e-3)


def test_each_step_draws_new_slices_and_a_second_start_draws_the_same():
    losses = []
    for _ in range(2):
        steps = Steps(*SIGREG)
        batch = steps.batch()
        losses.append([steps.client.step(batch).item() for _ in range(2)])
    assert losses[0] == losses[1]
    assert losses[0][0] != losses[0][1]
