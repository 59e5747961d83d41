"""Adapters: an encoder with adapters and the encoder that is stored compute the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from atoll.core.errors import UserError
from atoll.models.adapters import add_adapters, is_adapter, merged
from atoll.models.external import ExternalEncoder

pytest.importorskip("peft", reason="the extra atoll[peft] is not installed")


class Net(nn.Module):
    """A convolution and two linear layers, the second of which may have the first one's weight."""

    def __init__(self, normed: bool = False, tied: bool = False, **convolution: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, **convolution)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        if normed:
            weight_norm(self.first)
        if tied:
            self.second.weight = self.first.weight

    def forward(self, images: Tensor) -> Tensor:
        return self.second(self.first(self.conv(images)[:, :, 0, 0]))  # a corner, which shows the padding


def adapted(net: Net) -> ExternalEncoder:
    torch.manual_seed(0)
    encoder = ExternalEncoder(net, "Net", (4, 9, 9))
    add_adapters(encoder, rank=2, alpha=3, targets=["*.conv", "*.first"])
    for name, weight in encoder.named_parameters():
        if is_adapter(name):
            nn.init.normal_(weight)
    return encoder.eval()


@pytest.mark.parametrize("options", [{}, {"padding": "same"}, {"stride": 2, "padding": 1, "bias": False}])
def test_the_stored_encoder_computes_what_the_trained_one_does(options: dict[str, Any]) -> None:
    encoder, images = adapted(Net(**options)), torch.rand(3, 4, 9, 9)
    torch.testing.assert_close(merged(encoder)(images), encoder(images), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "layer"),
    [
        ({"normed": True}, "first"),
        ({"tied": True}, "first"),
        ({"groups": 2}, "conv"),
        ({"dilation": 2}, "conv"),
        ({"padding": 1, "padding_mode": "circular"}, "conv"),
    ],
)
def test_a_layer_whose_adapter_could_not_be_stored_is_refused(options: dict[str, Any], layer: str) -> None:
    with pytest.raises(
        UserError, match=rf"lora_targets matches model\.{layer}, which cannot have an adapter"
    ):
        adapted(Net(**options))


def test_a_layer_whose_name_ends_as_a_target_gets_no_adapter() -> None:
    net = Net()
    net.second = nn.Sequential()
    net.second.first = nn.Linear(8, 8)
    encoder = ExternalEncoder(net, "Net", (4, 9, 9))
    add_adapters(encoder, rank=2, alpha=3, targets=["model.first"])
    adapters = {name.partition(".lora_")[0] for name, _ in encoder.named_parameters() if is_adapter(name)}
    assert adapters == {"model.first"}
