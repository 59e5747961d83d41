import dataclasses

import pytest
import torch

from atoll.core.rng import stream
from atoll.methods.fedu2 import FUR
from tests.functional import oracles
from tests.steps import Steps


def test_the_regulariser_is_sliced_transport_of_both_views():
    steps = Steps("method.name=fedu2", "options.fur.projections=2", "model.projector_dim=3")
    batch = steps.batch()
    total = steps.client.step(batch).item()
    losses = {name: values[-1].item() for name, values in steps.client._losses.items()}
    draws = stream(steps.federation.recipe.seed, "fur", 1, 0)
    expected = 0.0
    for view in ("view1", "view2"):
        _, z = steps.encode(batch.images[view])
        n, d = z.shape
        tangents, samples = (torch.randn(n, d, generator=draws) for _ in range(2))
        directions = torch.randn(n, 2, d, generator=draws)

        def unit(points):
            return torch.tensor(oracles.units(points.double()), dtype=torch.float64)

        expected += oracles.tangent_transport(unit(z), unit(samples), unit(tangents), directions.double())
    assert losses["fur"] == pytest.approx(expected, rel=1e-3)
    assert total == pytest.approx(losses["simclr"] + 0.01 * losses["fur"], rel=1e-5)


def test_small_clients_train_more_epochs():
    setting = Steps("method.name=fedu2").client.setting
    train = dataclasses.replace(setting.train, batch_size=20, epochs=2)
    setting = dataclasses.replace(setting, train=train, sizes=(100, 30, 5, 2))
    fur = FUR(equal_steps=True)
    # (⌊100/20⌋ + 1)·2 = 12 steps at most; the clients have 5, 2, 1 and 1 batches.
    assert [fur.epochs(setting, client, range(4), 1) for client in range(4)] == [2, 6, 10, 10]
    # A rest of one image makes no batch.
    odd = dataclasses.replace(setting, sizes=(100, 41, 21, 1))
    assert [fur.epochs(odd, client, range(4), 1) for client in range(4)] == [2, 6, 10, 10]
    dropping = dataclasses.replace(setting, train=dataclasses.replace(train, drop_last=True))
    assert [fur.epochs(dropping, client, range(4), 1) for client in range(4)] == [2, 10, 10, 10]
    assert FUR().epochs(setting, 1, range(4), 1) is None
    assert fur.epochs(dataclasses.replace(setting, sizes=()), 1, range(4), 1) is None


def test_the_server_sends_the_epochs():
    steps = Steps("method.name=fedu2", "train.epochs=3")
    method, setting = steps.client.method, dataclasses.replace(steps.client.setting, sizes=(100, 50, 20, 20))
    state = method.init(setting, steps.federation.initial_weights())
    epochs = [method.send(state, setting, client, range(4), 1)["epochs"] for client in range(4)]
    assert epochs == [3, 6, 10, 10]
