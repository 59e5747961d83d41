import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.models.vision_transformer import EncoderBlock

from atoll.core.errors import UserError
from atoll.models import (
    ModelOptions,
    ViT,
    build_encoder,
    build_mae_decoder,
    patchify,
    random_masking,
    unpatchify,
)
from atoll.models.vit import Block, resample_positions


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def parameters(module):
    return sum(p.numel() for p in module.parameters())


@pytest.fixture
def small():
    torch.manual_seed(0)
    return ViT(channels=3, image_size=8, patch=2, width=64, depth=2).eval()


def test_vit_tiny_has_the_sizes_of_dec_ssl():
    options = ModelOptions(encoder="vit-tiny")
    encoder = build_encoder(options, 3, 32)
    decoder = build_mae_decoder(options, encoder)
    attention, perceptron = 4 * (192 * 192 + 192), (192 * 768 + 768) + (768 * 192 + 192)
    block = attention + perceptron + 4 * 192  # and two norms
    embedding = 12 * 192 + 192
    assert encoder.patches == 256
    assert parameters(encoder) == embedding + 192 + 257 * 192 + 12 * block + 2 * 192
    assert parameters(decoder) == 192 + 257 * 192 + 4 * block + 192 * 12 + 12
    assert encoder.blocks[0].self_attention.num_heads == 3
    assert encoder.dim == 192


def test_a_block_is_torchvisions():
    """A seed gives its initial weights; it computes the same, also backwards."""
    made = []
    for make in (lambda: Block(128), lambda: EncoderBlock(2, 128, 512, dropout=0.0, attention_dropout=0.0)):
        torch.manual_seed(0)
        block = make()
        x = torch.randn(2, 5, 128, requires_grad=True)
        y = block(x)
        y.square().sum().backward()
        made.append({**block.state_dict(), "y": y, "gradient": x.grad})
    ours, theirs = made
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


@pytest.mark.parametrize("channels", [1, 3])
def test_patches_are_the_images_squares(channels):
    images = torch.arange(2 * channels * 36.0).view(2, channels, 6, 6)
    patches = patchify(images, 2)
    assert patches.shape == (2, 9, channels * 4)
    for row in range(3):
        for column in range(3):
            square = images[:, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
            assert torch.equal(patches[:, 3 * row + column], square.flatten(1))
    assert torch.equal(unpatchify(patches, 2, 6), images)


@pytest.mark.parametrize("shape", [(1, 3, 5, 4), (1, 3, 4, 5), (1, 3, 1, 1), (3, 4, 4)])
def test_images_that_do_not_divide_into_patches_are_refused(small, shape):
    with pytest.raises(ValueError, match=r"sides that are multiples of 2, got \("):
        patchify(torch.ones(shape), 2)
    with pytest.raises(ValueError, match="multiples of 2"):
        small(torch.ones(shape))


def test_masks_exactly_192_of_256_patches():
    keep, mask = random_masking(50, 256, generator())
    assert keep.shape == (50, 64)
    assert torch.equal(mask.sum(1), torch.full((50,), 192.0))
    assert set(mask.unique().tolist()) == {0.0, 1.0}


@settings(max_examples=20, deadline=None)
@given(n=st.integers(1, 5), patches=st.integers(4, 40), ratio=st.floats(0.2, 0.8), seed=st.integers(0, 99))
def test_kept_and_masked_patches_are_a_partition(n, patches, ratio, seed):
    keep, mask = random_masking(n, patches, generator(seed), ratio)
    for row, visible in zip(mask, keep, strict=True):
        assert sorted(visible.tolist()) == (row == 0).nonzero().flatten().tolist()
    assert int(mask[0].sum()) == round(ratio * patches)


def test_images_are_masked_independently_and_by_the_generator_alone():
    keep, _ = random_masking(2, 256, generator(1))
    assert not torch.equal(keep[0].sort().values, keep[1].sort().values)
    torch.manual_seed(123)
    assert torch.equal(keep, random_masking(2, 256, generator(1))[0])


def test_masking_nothing_or_everything_is_refused():
    with pytest.raises(UserError, match=r"ratio of 0.01"):
        random_masking(1, 16, generator(), 0.01)
    with pytest.raises(UserError, match="leaves 0 visible"):
        random_masking(1, 16, generator(), 0.99)


def test_all_patches_kept_in_any_order_is_the_plain_forward(small):
    images = torch.rand(2, 3, 8, 8)
    keep = torch.stack([torch.randperm(16, generator=generator(i)) for i in range(2)])
    with torch.no_grad():
        torch.testing.assert_close(small.forward_masked(images, keep)[:, 0], small(images))


def test_the_place_of_a_patch_matters(small):
    patches = patchify(torch.rand(2, 3, 8, 8), 2)
    with torch.no_grad():
        upright, reversed_ = (small(unpatchify(p, 2, 8)) for p in (patches, patches.flip(1)))
    assert (upright - reversed_).abs().max() > 1e-3  # without positions only rounding would differ


def test_masked_pixels_do_not_reach_the_encoder(small):
    images = torch.rand(2, 3, 8, 8)
    keep, mask = random_masking(2, 16, generator())
    patches = patchify(images, 2)
    changed = unpatchify(torch.where(mask.bool().unsqueeze(-1), torch.rand_like(patches), patches), 2, 8)
    with torch.no_grad():
        assert torch.equal(small.forward_masked(images, keep), small.forward_masked(changed, keep))
        assert not torch.allclose(small(images), small(changed))


def test_decoder_puts_tokens_back_where_they_were(small):
    torch.manual_seed(1)
    decoder = build_mae_decoder(ModelOptions(encoder="vit-tiny", width=64, decoder_depth=1), small).eval()
    assert len(decoder.blocks) == 1
    decoder.blocks = torch.nn.Identity()  # without attention each prediction depends on its own token alone
    keep, mask = random_masking(2, 16, generator())
    tokens = torch.randn(2, 1 + keep.shape[1], 64)
    prediction = decoder(tokens, keep)
    assert prediction.shape == (2, 16, 12)
    for i in range(2):
        for p in range(16):
            at = (keep[i] == p).nonzero().flatten()
            token = decoder.mask_token[0, 0] if mask[i, p] else tokens[i, 1 + at[0]]
            torch.testing.assert_close(prediction[i, p], decoder.head(token + decoder.positions[0, 1 + p]))


def test_every_parameter_learns_and_blocks_differ(small):
    decoder = build_mae_decoder(ModelOptions(encoder="vit-tiny", width=64), small)
    keep, _ = random_masking(3, 16, generator())
    decoder(small.forward_masked(torch.rand(3, 3, 8, 8), keep), keep).square().mean().backward()
    for name, parameter in [*small.named_parameters(), *decoder.named_parameters()]:
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
    first, second = (block.mlp[0].weight for block in small.blocks)
    assert not torch.equal(first, second)


def test_patches_that_do_not_fit_and_encoders_without_patches_are_refused():
    with pytest.raises(UserError, match="side 9 do not divide into patches of side 2"):
        build_encoder(ModelOptions(encoder="vit-tiny"), 3, 9)
    options = ModelOptions(encoder="resnet-narrow")
    with pytest.raises(UserError, match=r"needs patches, .*'resnet-narrow'; set model.encoder = 'vit-tiny'"):
        build_mae_decoder(options, build_encoder(options, 3, 32))


def test_images_of_another_size_get_interpolated_positions(small):
    images = torch.rand(2, 3, 4, 4, generator=generator())
    fitting = build_encoder(ModelOptions(encoder="vit-tiny", width=64, depth=len(small.blocks)), 3, 4).eval()
    state = small.state_dict()
    state["positions"] = resample_positions(state["positions"], 1 + 4)
    fitting.load_state_dict(state)
    with torch.no_grad():
        assert torch.equal(small(images), fitting(images))
