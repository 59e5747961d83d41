import pytest
import torch

from atoll.core.errors import UserError
from atoll.models import ModelOptions, build_decoder, build_encoder


def parameters(module):
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(("channels", "image_size"), [(3, 32), (1, 16), (3, 84)])
@pytest.mark.parametrize(("name", "dim"), [("fedquad-cnn", 128), ("fedca-cnn", 2048)])
def test_representations_are_as_wide_as_the_papers_say(name, dim, channels, image_size):
    encoder = build_encoder(ModelOptions(encoder=name), channels, image_size).eval()
    h = encoder(torch.rand(2, channels, image_size, image_size))
    assert h.shape == (2, dim)
    assert encoder.dim == dim


def test_parameter_counts():
    def conv(before, after):
        return before * after * 9 + after + 2 * after  # weight, bias, scale and shift

    fedquad = build_encoder(ModelOptions(encoder="fedquad-cnn"), 3, 32)
    assert parameters(fedquad) == conv(3, 64) + conv(64, 128) + conv(128, 256) + 256 * 128 + 128
    fedca = build_encoder(ModelOptions(encoder="fedca-cnn"), 3, 32)
    shapes = [(3, 64), (64, 128), (128, 256), (256, 512), (512, 512)]
    assert parameters(fedca) == sum(conv(*shape) for shape in shapes)


def test_fedquad_embedding_is_neither_normalised_nor_cut_at_zero():
    torch.manual_seed(0)
    embedding = build_encoder(ModelOptions(encoder="fedquad-cnn"), 3, 32)(torch.rand(8, 3, 32, 32))
    assert (embedding < 0).any()
    assert embedding.norm(dim=1).std() > 1e-3


def test_too_small_images_are_refused():
    with pytest.raises(UserError, match="'fedca-cnn' needs images of side 16 or more, and these have 8"):
        build_encoder(ModelOptions(encoder="fedca-cnn"), 1, 8)


@pytest.mark.parametrize(("dim", "channels", "image_size"), [(2048, 3, 32), (128, 1, 20), (64, 3, 84)])
def test_decoder_gives_images_of_any_size(dim, channels, image_size):
    decoder = build_decoder(dim, channels, image_size)
    images = decoder(torch.randn(2, dim))
    assert images.shape == (2, channels, image_size, image_size)
    assert (images < 0).any()  # normalised images have negative values


def test_autoencoder_learns_to_reconstruct():
    torch.manual_seed(0)
    images = torch.rand(4, 1, 16, 16)
    encoder, decoder = build_encoder(ModelOptions(encoder="fedquad-cnn"), 1, 16), build_decoder(128, 1, 16)
    optimiser = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], 1e-2)
    losses = []
    for _ in range(20):
        loss = (decoder(encoder(images)) - images).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
