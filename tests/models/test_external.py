"""Encoders of other libraries against those libraries themselves."""

import importlib
import inspect
import json
import sys
import warnings

import pytest
import torch
from torch import nn

from atoll.core.errors import UserError
from atoll.core.given import Given
from atoll.models import (
    ExternalEncoder,
    MissingEncoderError,
    ModelOptions,
    build_encoder,
    give_encoder,
    input_config,
    load_encoder,
    rebuild_encoder,
    save_encoder,
)

timm = pytest.importorskip("timm", reason="the extra atoll[timm] is not installed")
transformers = pytest.importorskip("transformers", reason="the extra atoll[hf] is not installed")


class Net(nn.Module):
    """Eight features; with a seed, the weights are its own."""

    def __init__(self, channels=1, seed=None):
        super().__init__()
        self.conv = nn.Conv2d(channels, 8, 3)
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
            nn.init.normal_(self.conv.weight, generator=generator)
            nn.init.zeros_(self.conv.bias)

    def forward(self, images):
        return self.conv(images).mean((2, 3))


class Maps(Net):
    def forward(self, images):
        return self.conv(images)


class Empty(Net):
    def forward(self, images):
        return super().forward(images)[:, :0]


class Doubles(Net):
    def forward(self, images):
        return super().forward(images).double()


class Random(Net):
    """Forgets that dropout is for training, a mistake that nothing else shows."""

    def forward(self, images):
        return nn.functional.dropout(super().forward(images))


class Beside(Net):
    """Centres a batch in eval mode, too."""

    def forward(self, images):
        h = super().forward(images)
        return h - h.mean(0) if len(h) > 1 else h


class InPlace(Net):
    def forward(self, images):
        return super().forward(images.sub_(0.5))


class InPlaceReLU(Net):
    def forward(self, images):
        return super().forward(images.relu_())


class Wider(Net):
    def forward(self, images):
        h = super().forward(images)
        return torch.cat([h, h], dim=1) if self.training else h


class Complex(Net):
    def __init__(self, channels=1):
        super().__init__(channels)
        self.turn = nn.Parameter(torch.ones(8, dtype=torch.complex64))


class Extra(Net):
    def get_extra_state(self):
        return {"steps": 3}

    def set_extra_state(self, state):
        pass


class Auxiliary(Net):
    """Returns a second output in train mode, as torchvision's Inception does."""

    def forward(self, images):
        h = super().forward(images)
        return (h, h) if self.training else h


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.LazyConv2d(8, 3)

    def forward(self, images):
        return self.conv(images).mean((2, 3))


class Unbegun(nn.Module):
    def __init__(self):
        self.size = 8

    def forward(self, images):
        return images.flatten(1)


def configured(image_size):
    module = Net()
    module.data_config = {"input_size": (1, 48, 48), "mean": [0.25], "std": [0.5]}
    module.made_for = image_size
    return module


def not_a_module():
    return 3


def breaks():
    raise KeyError("weights.bin")


def build(name, channels=3, size=32):
    return build_encoder(ModelOptions(encoder=name), channels, size)


HERE = f"{__name__}:"


@pytest.mark.parametrize("name", ["test_vit", "test_convnext", "test_efficientnet"])
def test_a_timm_model_gives_what_timm_gives(name):
    encoder = build(f"timm:{name}").eval()
    sized = {"img_size": 32} if name == "test_vit" else {}
    theirs = timm.create_model(name, num_classes=0, **sized).eval()
    theirs.load_state_dict(encoder.library_state())
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(encoder(images), theirs(images))
        assert encoder.dim == theirs(images).shape[1]


def test_the_configuration_of_a_timm_model_is_timms_own():
    own = timm.data.resolve_data_config({}, model=timm.create_model("test_vit"))
    found = input_config("timm:test_vit", 3, None)
    assert (found.size, found.mean, found.std) == (own["input_size"][-1], own["mean"], own["std"])
    imagenet = input_config("timm:test_efficientnet", 1, None)
    assert imagenet.mean == pytest.approx((sum((0.485, 0.456, 0.406)) / 3,))


def test_a_hugging_face_folder_gives_its_architecture_its_size_and_its_normalisation(tmp_path, monkeypatch):
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=24,
        patch_size=8,
    )
    theirs = transformers.ViTModel(config).eval()
    theirs.save_pretrained(tmp_path / "vit")
    processing = {
        "image_processor_type": "ViTImageProcessor",
        "image_mean": [0.1, 0.2, 0.3],
        "image_std": [0.4] * 3,
    }
    (tmp_path / "vit/preprocessor_config.json").write_text(json.dumps(processing))
    name = f"hf:{tmp_path / 'vit'}"
    found = input_config(name, 3, None)
    assert (found.size, found.mean, found.std) == (24, (0.1, 0.2, 0.3), (0.4, 0.4, 0.4))
    encoder = build(name, size=24).eval()
    encoder.model.load_state_dict(theirs.state_dict())
    images = torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(encoder(images), theirs(images).last_hidden_state[:, 0])
    save_encoder(tmp_path / "encoder.safetensors", encoder, {})
    for file in (tmp_path / "vit").iterdir():
        file.unlink()  # the encoder's file holds the configuration
    with torch.no_grad():
        assert torch.equal(load_encoder(tmp_path / "encoder.safetensors")(images), encoder(images))


def test_a_hugging_face_convolutional_network_is_pooled_as_it_pools_itself():
    config = transformers.ConvNextConfig(hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1])
    theirs = transformers.ConvNextModel(config).eval()
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs(images).pooler_output
        assert torch.equal(ExternalEncoder(theirs, "convnext", (3, 32, 32))(images), expected)
    assert expected.shape == (2, 32)


def test_a_hugging_face_model_with_a_size_for_each_axis_is_built(tmp_path):
    config = transformers.HieraConfig(
        embed_dim=8, depths=[1, 1], num_heads=[1, 2], query_stride=[2, 2], num_query_pool=1
    )
    config.save_pretrained(tmp_path)
    encoder = build(f"hf:{tmp_path}", channels=1, size=32)
    assert encoder(torch.zeros(2, 1, 32, 32)).shape == (2, encoder.dim)
    assert rebuild_encoder(encoder.spec).dim == encoder.dim
    assert input_config(f"hf:{tmp_path}", 1, None).size == 224


def test_a_module_of_ones_own_is_called_with_what_its_signature_names():
    assert build(f"{HERE}Net", channels=2).model.conv.in_channels == 2
    encoder = build(f"{HERE}configured", channels=1, size=40)
    assert encoder.model.made_for == 40
    assert input_config(f"{HERE}configured", 1, 40).size == 48
    assert input_config(f"{HERE}Net", 1, None).size is None
    assert rebuild_encoder(json.loads(json.dumps(encoder.spec))).dim == 8


def test_measuring_the_width_leaves_modes_and_the_callers_random_numbers():
    module = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16), nn.Dropout(0.5).eval(), nn.Linear(16, 3))
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    encoder = ExternalEncoder(module, "mine", (1, 4, 4))
    assert torch.equal(torch.rand(1), expected)
    assert [one.training for one in module] == [True, True, False, True]
    assert encoder.dim == 3
    assert module[1].num_batches_tracked == 0


def test_a_given_module_is_copied_and_comes_back_with_its_object(tmp_path):
    mine = Net(seed=3)
    given = give_encoder(mine, 1, 16)
    encoder = build(given, channels=1, size=16)
    assert encoder.model is not mine
    assert torch.equal(encoder.model.conv.weight, mine.conv.weight)
    with torch.no_grad():
        encoder.model.conv.weight += 1
    save_encoder(tmp_path / "encoder.safetensors", encoder, {})
    loaded = load_encoder(tmp_path / "encoder.safetensors", mine)
    assert torch.equal(loaded.model.conv.weight, mine.conv.weight + 1)
    with pytest.raises(MissingEncoderError, match=r"given to its run as an object.*pass it again"):
        load_encoder(tmp_path / "encoder.safetensors")


def test_a_fingerprint_tells_weights_and_structure_apart_and_nothing_else():
    first, again, other = (give_encoder(Net(seed=seed), 1, 16) for seed in (3, 3, 4))
    assert isinstance(first, Given)
    assert first == again != other
    assert give_encoder(Net, 1, 16) == give_encoder(Net, 1, 16) != first
    assert give_encoder(Net, 1, 16) != give_encoder(Maps, 1, 16)
    assert give_encoder(Net, 1, 16) != give_encoder(Net, 2, 16)


NETWORK = """
from torch import nn
from blocks import Block

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, images):
        return self.block(images).flatten(1)
"""
BLOCKS = """
from torch import nn

class Block(nn.Module):
    def forward(self, x):  # a comment
        return x + 1
"""


def test_edits_of_the_modules_that_a_given_encoder_uses_are_another_encoder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # edits of one second look alike to Python

    def given(blocks, made=False):
        for name, text in (("network", NETWORK), ("blocks", blocks)):
            (tmp_path / f"{name}.py").write_text(text)
            monkeypatch.delitem(sys.modules, name, raising=False)
        network = importlib.import_module("network").Network
        return give_encoder(network() if made else network, 1, 16)

    for made in (False, True):
        assert given(BLOCKS, made) == given(BLOCKS.replace("a comment", "another"), made)
        assert given(BLOCKS, made) != given(BLOCKS.replace("x + 1", "x - 1"), made)


class Shy:
    __slots__ = ()

    def __repr__(self):
        raise RuntimeError


SHY = Shy()


class OfShy(Net):
    def forward(self, images):
        return super().forward(images) if SHY else images


def test_an_encoder_whose_code_cannot_be_read_is_known_by_its_text(monkeypatch):
    before = give_encoder(OfShy(seed=3), 1, 16)
    assert before == give_encoder(OfShy(seed=3), 1, 16) != give_encoder(Net(seed=3), 1, 16)
    getsource = inspect.getsource
    monkeypatch.setattr(inspect, "getsource", lambda kind: getsource(kind).replace("else", "or"))
    assert give_encoder(OfShy(seed=3), 1, 16) != before


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("timm:test_vitt", "timm has no such model; did you mean 'test_vit"),
        ("timm:test_vit.nope", "Invalid pretrained tag.*leave the tag out"),
        ("timm:nest_tiny", "cannot be built for images of side 33 .*: set data.image_size"),
        ("timm:levit_conv_128s", r"cannot process images of shape \(3, 33, 33\).*change data.channels"),
        ("hf:./nothing-here", "no folder and no name that transformers can read"),
        ("nothing_here:Net", "model.encoder 'nothing_here:Net': no module 'nothing_here'"),
        (f"{HERE}Nett", "has no 'Nett'"),
        (f"{HERE}Maps", r"returns a float32 tensor of shape \(1, 8, 31, 31\) for 1 image in eval"),
        (f"{HERE}Empty", r"returns a float32 tensor of shape \(1, 0\) for 1 image in eval"),
        (f"{HERE}Doubles", r"returns 1 row of float64 for one image.*with \.float\(\)"),
        (f"{HERE}Random", r"draws random numbers in eval mode.*only while self\.training"),
        (
            f"{HERE}Beside",
            "represents an image otherwise beside another one in eval mode.*running statistics",
        ),
        (f"{HERE}InPlace", "changes the images that it is given; let it compute on a copy"),
        (f"{HERE}InPlaceReLU", "changes the images that it is given; let it compute on a copy"),
        ("hf:vit_mae", "draws random numbers in eval mode.*hf:vit and model.weights"),
        (f"{HERE}Complex", "'turn' of its state is complex numbers"),
        (f"{HERE}Extra", "'_extra_state' of its state is no tensor"),
        (
            f"{HERE}not_a_module",
            "returns an int; it must be a class or function that returns a torch.nn.Module",
        ),
        (f"{HERE}Unbegun", r"Unbegun is no module yet; call super\(\).__init__\(\)"),
        (f"{HERE}breaks", "cannot be built: KeyError: 'weights.bin'"),
        ("object:Net#123", "was given to its run as an object.*pass it again as encoder="),
    ],
)
def test_mistakes_get_one_sentence(name, sentence, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=sentence):
        build(name, size=33)


@pytest.mark.parametrize("seed", range(8))
def test_random_masks_are_found_whatever_the_seed(seed):
    """At this size there are four masks, so that two of them are equal for a quarter of the seeds."""
    torch.manual_seed(seed)
    with pytest.raises(UserError, match="draws random numbers in eval mode"):
        build("hf:vit_mae", size=33)


def test_images_that_a_module_cannot_process_get_one_sentence():
    with pytest.raises(UserError, match=r"cannot process images of shape \(1, 2, 2\).*change data.channels"):
        build(f"{HERE}Net", channels=1, size=2)
    with pytest.raises(UserError, match=r"encoder is an int; give a torch\.nn\.Module"):
        give_encoder(3, 1, 16)
    with pytest.raises(
        UserError, match=r"encoder is a str; name 'timm:vit' in the recipe, as model\.encoder, or"
    ):
        give_encoder("timm:vit", 1, 16)


def test_an_encoder_is_built_within_the_callers_inference_mode(tmp_path):
    save_encoder(tmp_path / "e.safetensors", build(f"{HERE}Net", channels=1, size=16), {})
    images = torch.ones(2, 1, 16, 16)
    with torch.inference_mode():
        within = load_encoder(tmp_path / "e.safetensors")(images)
        with pytest.raises(UserError, match="changes the images"):
            build(f"{HERE}InPlaceReLU", channels=1, size=16)
    assert torch.equal(within, load_encoder(tmp_path / "e.safetensors")(images))


@pytest.mark.parametrize("config", [{"input_size": 224}, {"mean": 0.5}, {"std": ["a"]}, "ImageNet"])
def test_a_configuration_in_another_form_gets_one_sentence(config):
    module = Net()
    module.data_config = config
    with pytest.raises(UserError, match=r"data_config is .*it must be in timm's form"):
        input_config(give_encoder(module, 1, 16), 1, 16)


def test_another_output_in_train_mode_gets_one_sentence():
    encoder = build(f"{HERE}Auxiliary", channels=1, size=16)
    with pytest.raises(UserError, match=r"returns a tuple for 2 images in train mode"):
        encoder.train()(torch.zeros(2, 1, 16, 16))
    encoder = build(f"{HERE}Wider", channels=1, size=16)
    with pytest.raises(
        UserError, match=r"shape \(2, 16\) for 2 images in train mode.*of shape \(N, 8\); pool"
    ):
        encoder.train()(torch.zeros(2, 1, 16, 16))


def test_lazy_layers_get_their_weights_from_the_runs_seed_and_a_module_that_cannot_be_copied_a_sentence():
    torch.manual_seed(5)
    expected = nn.Conv2d(1, 8, 3).weight
    torch.manual_seed(5)
    encoder = build(give_encoder(Lazy, 1, 16), channels=1, size=16)
    assert torch.equal(encoder.model.conv.weight, expected)
    computed = Net()
    computed.weight = computed.conv.weight * 2  # as torch.nn.utils.weight_norm keeps it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions of PyTorch deprecate TorchScript
        scripted = torch.jit.script(nn.Conv2d(1, 8, 3))
    for module in (nn.Sequential(nn.LazyBatchNorm2d()), computed, scripted):
        with pytest.raises(
            UserError, match=r"cannot be copied: .*give a function or class that makes the module"
        ):
            give_encoder(module, 1, 16)


@pytest.mark.parametrize("source", [Unbegun, Unbegun(), lambda: nn.Sequential(nn.ReLU(), Unbegun())])
def test_a_given_module_without_its_init_gets_one_sentence(source):
    with pytest.raises(UserError, match=r"Unbegun is no module yet; call super\(\).__init__\(\)"):
        give_encoder(source, 1, 16)


def test_a_missing_library_gets_one_sentence(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "timm", None)
    with pytest.raises(MissingEncoderError, match=r"pip install '\.\[timm\]'"):
        build("timm:test_vit")
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(MissingEncoderError, match=r"pip install '\.\[hf\]'"):
        build("hf:vit")


def test_a_timm_vit_processes_images_of_another_size_as_timm_does():
    """Local crops are smaller than the images for which it is built."""
    encoder = build("timm:test_vit").eval()
    theirs = timm.create_model("test_vit", num_classes=0, img_size=32, dynamic_img_size=True).eval()
    theirs.load_state_dict(encoder.library_state())
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(encoder(images), theirs(images))


@pytest.mark.parametrize("kind", [torch.float16, torch.float64])
def test_weights_of_another_precision_are_named(kind):
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 4)).to(kind)
    with pytest.raises(UserError, match=f"has weights of {str(kind)[6:]}, and must have float32; .*\\.float"):
        ExternalEncoder(net, "mine", (1, 8, 8))
