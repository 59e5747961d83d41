"""A stack of encoders against the encoders one by one, in float64."""

import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from atoll.core.errors import UserError
from atoll.engines.encoder_stack import EncoderStack
from atoll.models import ModelOptions, build_encoder
from atoll.models.layout import memory_layout
from atoll.recipe.engine_options import EngineOptions
from tests.versions import since

ENCODERS = {
    "convolutions and BatchNorm": ModelOptions(encoder="resnet-narrow", width=4),
    "attention": ModelOptions(encoder="vit-tiny", width=64, depth=1, patch=4),
}


def different(encoder, count):
    """Copies of an encoder with different weights."""
    torch.manual_seed(0)
    copies = [copy.deepcopy(encoder).double() for _ in range(count)]
    for one in copies:
        for weight in one.parameters():
            weight.data.add_(0.1 * torch.randn_like(weight))
    return copies


def equal(tensor, other):
    torch.testing.assert_close(tensor, other, rtol=1e-9, atol=1e-12)


# Attention on a CPU has no stacked kernel, which PyTorch says once.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")


@pytest.mark.parametrize("rows", [[0, 1, 2], [0, 1], [2, 0], [1]], ids=str)
@pytest.mark.parametrize("options", ENCODERS.values(), ids=ENCODERS)
def test_outputs_gradients_and_statistics_are_those_of_the_encoders(options, rows):
    together = different(build_encoder(options, channels=3, image_size=8), 3)
    alone = copy.deepcopy(together)
    stack = EncoderStack(together)
    images, direction = torch.randn(len(rows), 5, 3, 8, 8).double(), torch.randn(together[0].dim).double()
    for _ in range(2):  # gradients add up, and statistics move on
        h = stack(rows, images)
        (torch.stack(h) @ direction).sin().sum().backward()
        stack.pass_on_gradients()
        for row, batch, own in zip(rows, images, h, strict=True):
            expected = alone[row](batch)
            equal(own, expected)
            (expected @ direction).sin().sum().backward()
    for one, other in zip(together, alone, strict=True):
        for weight, expected in zip(one.parameters(), other.parameters(), strict=True):
            assert (weight.grad is None) == (expected.grad is None)
            if weight.grad is not None:
                equal(weight.grad, expected.grad)
        for (name, tensor), expected in zip(
            one.state_dict().items(), other.state_dict().values(), strict=True
        ):
            equal(tensor, expected), name


def test_two_groups_of_rows_have_one_backward_pass():
    """Batches of two sizes: the statistics of one group are written between the passes of the other."""
    together = different(build_encoder(ENCODERS["convolutions and BatchNorm"], channels=1, image_size=8), 4)
    alone = copy.deepcopy(together)
    stack = EncoderStack(together)
    groups = {(0, 1): torch.randn(2, 5, 1, 8, 8).double(), (2, 3): torch.randn(2, 3, 1, 8, 8).double()}
    sum(h.sin().sum() for rows, images in groups.items() for h in stack(rows, images)).backward()
    stack.pass_on_gradients()
    for rows, images in groups.items():
        for row, batch in zip(rows, images, strict=True):
            alone[row](batch).sin().sum().backward()
    for one, other in zip(together, alone, strict=True):
        for weight, expected in zip(one.parameters(), other.parameters(), strict=True):
            equal(weight.grad, expected.grad)
        for buffer, expected in zip(one.buffers(), other.buffers(), strict=True):
            equal(buffer, expected)


def test_a_stack_computes_in_the_precision_of_its_weights_whatever_autocast_is():
    encoders = different(build_encoder(ENCODERS["attention"], channels=1, image_size=8), 2)
    stack, images = EncoderStack([encoder.float() for encoder in encoders]), torch.randn(2, 5, 1, 8, 8)
    expected = torch.stack([encoder(batch) for encoder, batch in zip(encoders, images, strict=True)])
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.stack(stack([0, 1], images))
        assert found.dtype == torch.float32
        assert (found @ torch.randn(encoders[0].dim, 3)).dtype == torch.bfloat16  # as for what follows
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_row_is_the_encoders_own_memory():
    encoders = different(build_encoder(ENCODERS["attention"], channels=1, image_size=8), 2)
    parameters = [list(encoder.parameters()) for encoder in encoders]
    stack = EncoderStack(encoders)
    images = torch.randn(2, 3, 1, 8, 8).double()
    before = stack([0, 1], images)
    optimizer = torch.optim.SGD(parameters[0], lr=0.1, momentum=0.9)
    before[0].sum().backward()
    stack.pass_on_gradients()
    optimizer.step()
    after = stack([0, 1], images)
    equal(after[0], encoders[0](images[0]))
    assert not torch.equal(after[0], before[0])
    assert torch.equal(after[1], before[1])
    encoders[1].load_state_dict(encoders[0].state_dict())
    equal(stack([0, 1], images[:1].expand(2, -1, -1, -1, -1))[1], after[0])


def test_frozen_weights_get_no_gradients():
    encoders = different(build_encoder(ENCODERS["attention"], channels=1, image_size=8), 2)
    for encoder in encoders:
        next(encoder.parameters()).requires_grad_(False)
    stack = EncoderStack(encoders)
    torch.stack(stack([0, 1], torch.randn(2, 3, 1, 8, 8).double())).sum().backward()
    stack.pass_on_gradients()
    first, *others = encoders[1].parameters()
    assert first.grad is None
    assert all(weight.grad is not None for weight in others)


class Branch(nn.Module):
    """An encoder whose way depends on its input's values."""

    def forward(self, images):
        return images.flatten(1) if images.sum() > 0 else -images.flatten(1)


@pytest.mark.parametrize(
    ("encoder", "reason"),
    [(nn.Sequential(nn.Flatten(), nn.Dropout(0.5)), "random"), (Branch(), "data-dependent")],
    ids=["dropout", "branch"],
)
def test_what_cannot_be_stacked_is_a_sentence(encoder, reason):
    stack = EncoderStack([encoder, copy.deepcopy(encoder)])
    with pytest.raises(
        UserError,
        match=f"engine.stack cannot be used with this encoder: .*{reason}.*; leave out engine.stack",
    ):
        stack([0, 1], torch.ones(2, 3, 1, 8, 8))


def test_other_errors_of_an_encoder_remain():
    encoder = nn.Linear(5, 2)
    with pytest.raises(RuntimeError, match="Expected size for first two dimensions"):
        EncoderStack([encoder, copy.deepcopy(encoder)])([0, 1], torch.ones(2, 3, 4))


@since(torch, 2, 9, reason="computes indices of fake tensors on a GPU")
@pytest.mark.parametrize(
    "options",
    # not so narrow that it never has the channels-last layout
    [ModelOptions(encoder="resnet-narrow", width=16), ENCODERS["attention"]],
    ids=ENCODERS,
)
def test_encoders_are_stacked_on_a_gpu(options, monkeypatch):
    """In a run's layout. PyTorch chooses a GPU's operations for its fake tensors, and computes nothing."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(EngineOptions, "find_device", lambda self: torch.device("cuda"))
    encoders = [build_encoder(options, channels=3, image_size=8) for _ in range(2)]
    with FakeTensorMode(), torch.device("cuda"):
        for encoder in encoders:
            layout = memory_layout(encoder, EngineOptions(stack=2).uses_channels_last())
            for module in encoder.modules():
                for name, weight in module.named_parameters(recurse=False):
                    on_gpu = torch.empty(weight.shape)
                    on_gpu = on_gpu.contiguous(memory_format=layout) if weight.dim() == 4 else on_gpu
                    setattr(module, name, nn.Parameter(on_gpu))
                for name, buffer in module.named_buffers(recurse=False):
                    setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))
        images = [torch.empty(5, 3, 8, 8).contiguous(memory_format=layout) for _ in encoders]
        outputs = EncoderStack(encoders)(range(2), images)
    assert [(h.shape, h.device.type) for h in outputs] == [((5, encoders[0].dim), "cuda")] * 2
