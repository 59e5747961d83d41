import pytest
import torch

from tests.harness import run_tiny
from tests.steps import Steps


def test_the_term_is_half_the_squared_distance_to_the_downloaded_model():
    steps = Steps("method.name=fedprox", "options.fedprox.weight=0.3")
    context = steps.client.context
    (term,) = steps.client.method.terms
    for step in range(2):
        total = steps.client.step(steps.batch())
        losses = {name: values[-1].item() for name, values in steps.client._losses.items()}
        expected = sum(
            0.5 * (value.double() - context.received[name].double()).square().sum().item()
            for name, value in steps.networks.named_parameters()
        )
        assert losses["fedprox"] == pytest.approx(expected, rel=1e-4, abs=1e-12)
        assert total.item() == pytest.approx(losses["simclr"] + 0.3 * expected, rel=1e-5)
        assert (expected > 0) == (step > 0)
        steps.update(total)
    for parameter in steps.networks.parameters():
        parameter.grad = None
    term.loss(context, None, {}).backward()
    for name, value in steps.networks.named_parameters():
        assert torch.allclose(value.grad, value - context.received[name])


def test_the_number_of_the_dossier():
    steps = Steps("method.name=fedprox")
    (term,) = steps.client.method.terms
    scope = steps.client.context.of(term)
    scope.weights, scope.downloaded = [torch.tensor([1.0, 2.0])], [torch.zeros(2)]
    assert 0.1 * term.loss(steps.client.context, None, {}).item() == pytest.approx(0.25)


def test_with_mu_zero_it_is_fedavg(tmp_path):
    plain = run_tiny(tmp_path / "plain", "method.name=fed_simclr")
    prox = run_tiny(tmp_path / "prox", "method.name=fedprox", "options.fedprox.weight=0.0")
    assert plain.encoder_path.read_bytes() == prox.encoder_path.read_bytes()


def test_a_strong_mu_keeps_the_model_where_it_was():
    def distance(mu):
        steps = Steps("method.name=fedprox", f"options.fedprox.weight={mu}", "train.weight_decay=0.0")
        for _ in range(6):
            steps.update(steps.client.step(steps.batch()))
        moved = [w - steps.client.context.received[name] for name, w in steps.networks.named_parameters()]
        return sum(m.square().sum().item() for m in moved)

    assert distance(5.0) < 0.5 * distance(0.001)
