import pytest
import torch
import torchvision
from torch import nn

from atoll.core.errors import UserError
from atoll.models import ModelOptions, ResNet, build_encoder


def build(encoder="resnet18", channels=3, image_size=32, seed=0, **options):
    torch.manual_seed(seed)
    return build_encoder(ModelOptions(encoder=encoder, **options), channels, image_size)


def parameters(module):
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("encoder", "stem", "count", "dim"),
    [
        ("resnet18", "standard", 11_176_512, 512),
        ("resnet18", "cifar", 11_168_832, 512),
        (
            "resnet34",
            "standard",
            21_797_672 - 513_000,
            512,
        ),  # torchvision's documented counts, less the classifier
        ("resnet50", "standard", 25_557_032 - 2_049_000, 2048),
    ],
)
def test_parameter_counts_are_the_published_ones(encoder, stem, count, dim):
    model = build(encoder, stem=stem)
    assert parameters(model) == count
    assert model.dim == dim


def test_cifar_stem_keeps_the_size_and_leaves_4x4_maps():
    model = build().eval()
    images = torch.rand(2, 3, 32, 32)
    assert model.maxpool(model.conv1(images)).shape == (2, 64, 32, 32)
    maps = model.feature_maps(images)
    assert maps.shape == (2, 512, 4, 4)  # 8192 numbers an image, as L-DAWA's probe reads
    assert maps.flatten(1).shape[1] == 8192
    torch.testing.assert_close(model(images), maps.flatten(2).mean(2))


@pytest.mark.parametrize(
    ("stem", "kernel", "side"), [("cifar", 3, 32), ("strided", 3, 16), ("standard", 7, 8)]
)
def test_stems(stem, kernel, side):
    model = build("resnet-narrow", stem=stem)
    assert model.maxpool(model.conv1(torch.rand(1, 3, 32, 32))).shape[-1] == side
    assert (model.conv1.kernel_size, model.conv1.bias) == ((kernel, kernel), None)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_standard_resnet_is_torchvisions(name):
    torch.manual_seed(0)
    theirs = torchvision.models.get_model(name, weights=None).eval()
    ours = build(name, stem="standard", image_size=64, seed=1).eval()
    state = {k: v for k, v in theirs.state_dict().items() if not k.startswith("fc.")}
    ours.load_state_dict(state, strict=True)
    theirs.fc = nn.Identity()
    images = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images))


@pytest.mark.parametrize("name", ["resnet18", "resnet34", "resnet50"])
def test_a_seed_gives_the_stages_torchvisions_weights(name):
    torch.manual_seed(1)
    theirs = torchvision.models.get_model(name, weights=None).state_dict()
    ours = build(name, stem="standard", image_size=64, seed=1).state_dict()
    expected = {k: v for k, v in theirs.items() if k.startswith("layer")}
    assert expected.keys() == {k for k in ours if k.startswith("layer")}
    assert all(torch.equal(ours[name], weight) for name, weight in expected.items())


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("image_size", [8, 16, 32])
def test_narrow_resnet_takes_small_grey_and_colour_images(channels, image_size):
    model = build("resnet-narrow", channels, image_size, stem="strided", width=8)
    h = model(torch.rand(4, channels, image_size, image_size))
    assert h.shape == (4, model.dim) == (4, 64)
    h.square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_narrow_resnet_has_the_count_of_a_resnet10():
    # Two 3×3 convolutions a block, 1×1 shortcuts from the second stage on, a scale and shift for every norm.
    w = [16, 32, 64, 128]
    expected = 27 * 16 + 2 * 16
    for before, after in zip([16, 16, 32, 64], w, strict=True):
        expected += 9 * before * after + 9 * after * after + 4 * after
        expected += before * after + 2 * after if before != after else 0
    model = build("resnet-narrow")
    assert parameters(model) == expected == 307_536
    assert model.dim == 128


def test_norms_are_found_by_type_in_stem_blocks_and_shortcuts():
    norms = {n for n, m in build().named_modules() if isinstance(m, nn.BatchNorm2d)}
    assert len(norms) == 20
    assert {"bn1", "layer1.0.bn2", "layer2.0.downsample.1"} <= norms


def test_training_moves_buffers_and_evaluation_does_not():
    model = build("resnet-narrow", stem="strided")
    images = torch.rand(4, 3, 32, 32)
    before = model.bn1.running_mean.clone()
    model.eval()(images)
    assert torch.equal(model.bn1.running_mean, before)
    model.train()(images)
    assert not torch.equal(model.bn1.running_mean, before)
    assert model.bn1.num_batches_tracked.dtype == torch.int64
    assert model.bn1.num_batches_tracked == 1


@pytest.mark.parametrize("encoder", ["resnet18", "resnet-narrow"])
def test_convolutions_start_as_he_et_al_say(encoder):
    model = build(encoder)
    for name in ("conv1", "layer4.0.conv2"):
        conv = model.get_submodule(name)
        std = (2 / (conv.out_channels * 9)) ** 0.5
        assert conv.weight.std().item() == pytest.approx(std, rel=0.1)


def test_torchvision_weights_offline_say_what_to_do(monkeypatch, tmp_path):
    def unreachable(*args, **kwargs):
        raise OSError("no route to host")

    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path))
    monkeypatch.setattr("torch.hub.urlopen", unreachable)
    with pytest.raises(
        UserError, match=r"resnet18 could not be downloaded.*no route to host.*model.init = 'random'"
    ):
        build(init="torchvision")


def test_torchvision_weights_fill_all_but_the_stem(monkeypatch):
    torch.manual_seed(5)
    published = torchvision.models.resnet18(weights=None).state_dict()
    weights = torchvision.models.ResNet18_Weights
    monkeypatch.setattr(weights, "get_state_dict", lambda self, **options: published)
    model, random = build(init="torchvision").state_dict(), build().state_dict()
    assert torch.equal(model.pop("conv1.weight"), random["conv1.weight"])
    assert all(torch.equal(value, published[name]) for name, value in model.items())


def test_resnet_is_exported():
    assert isinstance(build("resnet-narrow"), ResNet)
