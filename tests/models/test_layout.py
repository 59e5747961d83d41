"""Channels-last is used unless oneDNN's kernels would write outside their memory."""

import pytest
import torch
from torch import nn
from torchvision.models import resnet18

from atoll.models.layout import memory_layout
from tests.rounds import Rounds


def shortcut(channels: int, stride: int = 2, kernel: int = 1, groups: int = 1) -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.Conv2d(channels, 32, kernel, stride, groups=groups)))


@pytest.mark.parametrize(
    ("networks", "wanted", "found"),
    [
        (shortcut(15), True, False),
        (shortcut(32, groups=4), True, False),  # each group has 8
        (shortcut(16), True, True),
        (shortcut(15, stride=1), True, True),
        (shortcut(3, kernel=3), True, True),
        (resnet18(), True, True),
        (resnet18(), False, False),
    ],
)
def test_a_narrow_strided_shortcut_keeps_the_default_layout(networks, wanted, found):
    assert (memory_layout(networks, wanted) == torch.channels_last) == found


@pytest.mark.parametrize(("width", "last"), [(4, False), (16, True)])
def test_weights_and_images_of_a_federation_have_one_layout(width, last):
    federation = Rounds("engine.channels_last=true", "data.channels=3", f"model.width={width}").federation
    batch = next(iter(federation.client_data(0).batches(1, 1, ("view1",))))
    convolutions = [w for w in federation.networks.parameters() if w.ndim == 4 and w.shape[2] == 3]
    for tensor in (batch.images["view1"], *convolutions[1:]):
        assert tensor.is_contiguous(memory_format=torch.channels_last) == last
