import pytest
import torch
from torch import Tensor, nn

from atoll.core.errors import UserError
from atoll.core.threads import one_thread
from atoll.data.images import StoredPixels
from atoll.evaluation.embed import embed, sample
from atoll.models import ModelOptions, build_encoder


class Net(nn.Module):
    """Feature maps, pooled; BatchNorm and dropout tell train mode from eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3)
        self.norm = nn.BatchNorm2d(5)
        self.drop = nn.Dropout(0.5)

    def feature_maps(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(self.conv(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.feature_maps(x).mean((2, 3))


def to_float(pixels: Tensor) -> Tensor:
    return pixels.float() / 255


@pytest.fixture
def pixels() -> Tensor:
    return torch.randint(256, (23, 3, 6, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("batch_size", [1, 7, 23, 100])
def test_rows_are_the_images_in_order_whatever_the_batches(pixels: Tensor, batch_size: int) -> None:
    net = Net().train()
    h = embed(net, to_float, StoredPixels(pixels), batch_size=batch_size)
    weight, bias = net.conv.weight.double(), net.conv.bias.double()
    one_by_one = (
        torch.stack(
            [
                nn.functional.conv2d(image[None].double() / 255, weight, bias)[0].mean((1, 2))
                for image in pixels
            ]
        )
        / (1 + net.norm.eps) ** 0.5
    )
    assert h.dtype == torch.float32
    assert not h.requires_grad
    torch.testing.assert_close(h.double(), one_by_one, rtol=1e-5, atol=1e-6)


def test_modes_and_buffers_are_left_as_they_were(pixels: Tensor) -> None:
    net = Net().train()
    net.norm.eval()  # a frozen norm inside a network in training
    before = {name: value.clone() for name, value in net.state_dict().items()}
    embed(net, to_float, StoredPixels(pixels))
    assert net.training
    assert net.drop.training
    assert not net.norm.training
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_modes_are_restored_after_an_error(pixels: Tensor) -> None:
    net = Net().train()
    with pytest.raises(RuntimeError):
        embed(net, lambda x: x, StoredPixels(pixels))  # uint8 into a convolution
    assert net.norm.training


def test_maps_are_what_pooling_averages(pixels: Tensor) -> None:
    net = Net()
    maps = embed(net, to_float, StoredPixels(pixels), maps=True)
    assert maps.shape == (23, 5 * 4 * 4)
    torch.testing.assert_close(maps.view(23, 5, 16).mean(2), embed(net, to_float, StoredPixels(pixels)))


@pytest.mark.parametrize("maps", [None, "no function", lambda images: images.flatten(1)])
def test_an_encoder_without_maps_is_refused_by_name(pixels: Tensor, maps: object) -> None:
    flat = nn.Sequential(nn.Flatten(), nn.Linear(108, 4))
    if maps is not None:
        flat.feature_maps = maps
    with pytest.raises(UserError, match="Sequential has none"):
        embed(flat, to_float, StoredPixels(pixels), maps=True)


@pytest.mark.parametrize(
    ("encoder", "shape"),
    [
        (nn.Conv2d(3, 5, 3), r"\(23, 5, 4, 4\)"),
        (nn.Flatten(0, 2), r"\(414, 6\)"),
        (nn.Flatten(0), r"\(2484,\)"),
    ],
    ids=["maps", "more rows", "no rows"],
)
def test_an_output_that_is_no_row_per_image_is_refused(
    pixels: Tensor, encoder: nn.Module, shape: str
) -> None:
    with pytest.raises(ValueError, match=rf"{shape} for 23"):
        embed(encoder, to_float, StoredPixels(pixels))


def test_representations_are_float32_whatever_the_encoder_computes_in(pixels: Tensor) -> None:
    net = Net()
    h = embed(net, to_float, StoredPixels(pixels))
    double = embed(net.double(), lambda images: to_float(images).double(), StoredPixels(pixels))
    assert double.dtype == torch.float32
    torch.testing.assert_close(double, h)


def test_sample_draws_once_for_a_seed_and_purpose() -> None:
    rows = sample(100, 10, 1, "a")
    assert torch.equal(rows, sample(100, 10, 1, "a"))
    assert torch.equal(rows, rows.unique())
    assert len(rows) == 10
    assert not torch.equal(rows, sample(100, 10, 1, "b"))
    assert not torch.equal(rows, sample(100, 10, 2, "a"))
    assert torch.equal(sample(5, 10, 1, "a"), torch.arange(5))


def test_one_thread_gives_the_threads_back() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with one_thread(torch.device("cpu")):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_our_resnets_give_their_maps() -> None:
    encoder = build_encoder(ModelOptions(encoder="resnet-narrow", width=4), channels=1, image_size=8).eval()
    images = StoredPixels(torch.randint(0, 256, (6, 1, 8, 8), dtype=torch.uint8))
    maps = embed(encoder, to_float, images, maps=True)
    h = embed(encoder, to_float, images)
    torch.testing.assert_close(maps.reshape(6, encoder.dim, -1).mean(2), h)
