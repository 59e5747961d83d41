import pytest
import torch

from tests.harness import tiny
from tests.steps import Steps, federation


def test_the_local_loss_is_the_mean_squared_error_of_plain_images():
    steps = Steps("method.name=fed_ae")
    batch = steps.batch()
    assert batch.images.keys() == {"image"}
    assert torch.equal(batch.images["image"], steps.data.pick(batch.indices))
    loss = steps.client.step(batch)
    h, _ = steps.encode(batch.images["image"])
    with torch.no_grad():
        rebuilt = steps.networks["decoder"](h)
    errors = [
        (a - b) ** 2
        for a, b in zip(
            rebuilt.double().flatten().tolist(),
            batch.images["image"].double().flatten().tolist(),
            strict=True,
        )
    ]
    assert loss.item() == pytest.approx(sum(errors) / len(errors), rel=1e-5)


def test_there_is_no_projector_to_travel():
    assert set(federation("method.name=fed_ae").networks) == {"encoder", "decoder"}
    assert tiny("method.name=fed_ae").composed.title == "FedAE"
