import pytest
import torch
from torch import nn

from atoll.models import ModelOptions, build_encoder
from atoll.models.gradient_checkpointing import checkpointed


class Dropping(nn.Module):
    """No blocks, BatchNorm, and random draws."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5)

    def forward(self, images):
        return self.drop(self.norm(self.conv(images))).mean((2, 3))


def encoders():
    yield build_encoder(ModelOptions(encoder="resnet-narrow", width=4), 3, 16)
    yield build_encoder(ModelOptions(encoder="vit-tiny", width=64, depth=3, patch=4), 3, 16)
    yield Dropping()
    if pytest.importorskip("timm"):
        yield build_encoder(ModelOptions(encoder="timm:test_vit"), 3, 32)
        yield build_encoder(ModelOptions(encoder="timm:test_efficientnet"), 3, 32)


def trained(encoder, enabled):
    """Gradients, state and random stream after a step, and the bytes that its forward pass kept."""
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    size = 32 if "model.conv_stem.weight" in before or "model.pos_embed" in before else 16
    images = torch.randn(6, 3, size, size, generator=torch.Generator().manual_seed(1))
    kept: dict[int, int] = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    torch.manual_seed(3)
    encoder.train()
    with checkpointed(encoder, enabled):
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = encoder(images).square().mean()
        held = sum(kept.values())
        loss.backward()
    after = {name: value.clone() for name, value in encoder.state_dict().items()}
    gradients = {name: weight.grad for name, weight in encoder.named_parameters()}
    encoder.load_state_dict(before)
    encoder.zero_grad(set_to_none=True)
    return gradients, after, torch.rand(1), held


@pytest.mark.parametrize("number", range(5))
def test_gradients_statistics_and_draws_are_those_without_it(number):
    torch.manual_seed(0)
    encoder = list(encoders())[number]
    gradients, state, draw, held = trained(encoder, False)
    again, restated, redrawn, fewer = trained(encoder, True)
    assert gradients.keys() == again.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, again[name]), name
    for name, value in state.items():
        assert torch.equal(value, restated[name]), name
    assert torch.equal(draw, redrawn)
    assert fewer < held / 2
    assert all("forward" not in vars(module) for module in encoder.modules())


def test_without_gradients_nothing_is_kept_or_changed():
    encoder = build_encoder(ModelOptions(encoder="resnet-narrow", width=4), 3, 16).eval()
    images = torch.rand(2, 3, 16, 16)
    with torch.no_grad(), checkpointed(encoder):
        inside = encoder(images)
    with torch.no_grad():
        assert torch.equal(inside, encoder(images))


def test_a_forward_that_a_library_has_replaced_stays():
    encoder = build_encoder(ModelOptions(encoder="resnet-narrow", width=4), 3, 16)
    block = next(module for module in encoder.modules() if type(module).__name__ == "BasicBlock")
    calls, own = [], block.forward
    block.forward = replaced = lambda x: calls.append(1) or own(x)
    with checkpointed(encoder):
        encoder(torch.ones(2, 3, 16, 16)).sum().backward()
    assert len(calls) == 2  # forward, and again in the backward pass
    assert block.forward is replaced
