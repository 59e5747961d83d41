import json

import pytest
import torch

from atoll.core.errors import UserError
from atoll.models import ENCODERS, ModelOptions, build_encoder, rebuild_encoder

SMALL = {"resnet-narrow": {"width": 8, "stem": "strided"}, "vit-tiny": {"width": 64, "depth": 1, "patch": 4}}


def test_the_named_encoders_are_all_there():
    papers = {"resnet18", "resnet34", "resnet50", "resnet-narrow", "fedquad-cnn", "fedca-cnn", "vit-tiny"}
    assert set(ENCODERS) == papers


@pytest.mark.parametrize("name", ["resnet18", "resnet-narrow", "fedquad-cnn", "fedca-cnn", "vit-tiny"])
def test_an_encoder_is_a_function_of_the_seed_alone(name):
    options = ModelOptions(encoder=name, **SMALL.get(name, {}))

    def weights(seed):
        torch.manual_seed(seed)
        return build_encoder(options, 3, 16).state_dict()

    first, again, other = weights(0), weights(0), weights(1)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", ENCODERS)
def test_spec_is_json_and_rebuilds_the_architecture(name):
    with torch.device("meta"):
        encoder = build_encoder(ModelOptions(encoder=name, **SMALL.get(name, {})), 1, 16)
        again = rebuild_encoder(json.loads(json.dumps(encoder.spec)))
    assert again.spec == encoder.spec
    shapes = [{k: v.shape for k, v in e.state_dict().items()} for e in (encoder, again)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"encoder": "resnet8"}, "model.encoder is 'resnet8'.*did you mean 'resnet"),
        (
            {"encoder": "vit_tiny_patch16_224"},
            r"known: .*, vit-tiny \(others are timm:NAME, hf:NAME or module:",
        ),
        ({"stem": "cifer"}, "model.stem is 'cifer'.*did you mean 'cifar'"),
        ({"init": "imagenet"}, "model.init is 'imagenet'.*known: random, torchvision"),
        ({"projector": "linear"}, "model.projector is 'linear'.*known: mlp, none"),
        (
            {"projector_final_norm": "batch"},
            "model.projector_final_norm is 'batch'.*known: affine, none, plain",
        ),
        ({"projector_dim": 0}, "model.projector_dim is 0; it must be above 0"),
        ({"projector_hidden": (512, -1)}, r"model.projector_hidden is \[512, -1\]"),
        ({"predictor_hidden": (0,)}, r"model.predictor_hidden is \[0\]"),
        ({"width": 32}, "model.width does not apply to 'resnet18'.*resnet-narrow, vit-tiny"),
        (
            {"encoder": "vit-tiny", "stem": "standard"},
            r"model.stem does not apply to 'vit-tiny'; reset it to its default, 'cifar' \(--set model.stem=\)",
        ),
        (
            {"encoder": "resnet-narrow", "init": "torchvision"},
            "model.init does not apply to 'resnet-narrow'",
        ),
        ({"encoder": "resnet-narrow", "width": -4}, "model.width is -4"),
        ({"encoder": "vit-tiny", "width": 100}, "model.width is 100; for a ViT, choose a multiple of 64"),
    ],
)
def test_mistakes_get_one_sentence(options, sentence):
    with pytest.raises(UserError, match=sentence):
        ModelOptions(**options)


def test_options_that_an_encoder_reads_are_accepted():
    ModelOptions(encoder="resnet-narrow", stem="strided", width=24)
    ModelOptions(encoder="vit-tiny", width=128, depth=2, patch=4, decoder_depth=1)
    ModelOptions(encoder="resnet50", stem="standard", init="torchvision")
