from __future__ import annotations

import math

import pytest
import torch
from torchvision.models import resnet18
from torchvision.models.detection import FasterRCNN, MaskRCNN
from torchvision.models.detection.backbone_utils import _resnet_fpn_extractor

from atoll.core.errors import UserError
from atoll.evaluation.detection.network import STRIDES, PyramidBackbone, make_detector, stage_shapes
from atoll.evaluation.detection.options import DetectionOptions
from atoll.models import Encoder, ModelOptions, build_encoder
from atoll.models.resnet import ResNet

CHANNELS = {
    "resnet18": [64, 128, 256, 512],
    "resnet34": [64, 128, 256, 512],
    "resnet50": [256, 512, 1024, 2048],
    "resnet-narrow": [16, 32, 64, 128],
}
FINEST = {"cifar": 1, "strided": 2, "standard": 4}


def resnet(name: str = "resnet-narrow", stem: str = "strided", channels: int = 3) -> ResNet:
    torch.manual_seed(0)
    encoder = build_encoder(ModelOptions(encoder=name, stem=stem), channels, 32)
    assert isinstance(encoder, ResNet)
    return encoder


@pytest.mark.parametrize("stem", FINEST)
@pytest.mark.parametrize("name", CHANNELS)
def test_the_pyramid_has_five_levels_of_one_width_for_each_resnet(name: str, stem: str) -> None:
    encoder = resnet(name, stem)
    strides = [FINEST[stem] * 2**i for i in range(4)]
    assert stage_shapes(encoder) == list(zip(CHANNELS[name], strides, strict=True))
    backbone = PyramidBackbone(encoder, 24).eval()
    assert backbone.levels == [stride for stride in strides if stride >= 4]
    with torch.no_grad():
        levels = backbone(torch.rand(2, 3, 36, 64))
    assert list(levels) == ["0", "1", "2", "3", "4"]
    for maps, stride in zip(levels.values(), STRIDES, strict=True):
        assert maps.shape == (2, 24, math.ceil(36 / stride), math.ceil(64 / stride))


def test_measuring_the_strides_changes_nothing() -> None:
    encoder = resnet().train()
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    stage_shapes(encoder)
    assert encoder.training
    assert all(torch.equal(before[name], value) for name, value in encoder.state_dict().items())


def test_with_the_standard_stem_losses_are_those_of_torchvisions_own_network() -> None:
    torch.manual_seed(3)
    theirs = FasterRCNN(_resnet_fpn_extractor(resnet18(), 5), 3, min_size=64, max_size=96).train()
    ours = make_detector(resnet("resnet18", "standard"), 2, DetectionOptions(size=64, max_size=96)).train()
    ours.transform.image_mean, ours.transform.image_std = (
        theirs.transform.image_mean,
        theirs.transform.image_std,
    )
    renamed = {
        name.replace("backbone.body", "backbone.encoder"): v for name, v in theirs.state_dict().items()
    }
    ours.load_state_dict(renamed)
    images = [torch.rand(3, 64, 80), torch.rand(3, 70, 64)]
    target = {"boxes": torch.tensor([[4.0, 6.0, 40.0, 50.0]]), "labels": torch.tensor([2])}
    losses = []
    for detector in (ours, theirs):
        torch.manual_seed(9)
        losses.append(detector(images, [target, target]))
    assert losses[0].keys() == losses[1].keys()
    for name in losses[0]:
        torch.testing.assert_close(losses[0][name], losses[1][name])


def test_widths_follow_the_encoder_unless_they_are_given() -> None:
    by_default = make_detector(resnet(), 2, DetectionOptions())
    assert by_default.backbone.out_channels == 64
    assert by_default.roi_heads.box_head.fc6.weight.shape == (256, 64 * 7 * 7)
    assert by_default.roi_heads.box_predictor.cls_score.out_features == 3
    assert make_detector(resnet("resnet50"), 2, DetectionOptions()).backbone.out_channels == 256
    given = make_detector(resnet(), 2, DetectionOptions(fpn_width=8, head_width=20, masks=True))
    assert isinstance(given, MaskRCNN)
    assert given.roi_heads.box_head.fc6.weight.shape == (20, 8 * 7 * 7)
    assert given.roi_heads.mask_predictor.mask_fcn_logits.weight.shape[:2] == (3, 8)


def test_images_are_normalised_as_the_encoder_was_trained_grey_ones_too() -> None:
    encoder = resnet(channels=1)
    encoder.metadata = {"mean": [0.25], "std": [0.5]}
    detector = make_detector(encoder, 1, DetectionOptions(size=32, max_size=32, fpn_width=8)).eval()
    images, _ = detector.transform([torch.full((1, 32, 32), 0.75)])
    assert images.tensors.unique().tolist() == [1.0]
    assert len(detector([torch.rand(1, 50, 40)])) == 1


@pytest.mark.parametrize(("norm", "moves"), [("train", True), ("frozen", False)])
def test_a_frozen_batchnorm_keeps_its_statistics_and_is_not_trained(norm: str, moves: bool) -> None:
    detector = make_detector(resnet(), 1, DetectionOptions(size=32, max_size=32, fpn_width=8, norm=norm))
    detector.train()
    encoder = detector.backbone.encoder
    before = encoder.bn1.running_mean.clone()
    detector.backbone(torch.rand(2, 3, 32, 32))
    assert encoder.bn1.weight.requires_grad == moves
    assert torch.equal(before, encoder.bn1.running_mean) != moves
    assert detector.backbone.fpn.training


def test_an_encoder_without_stages_is_refused() -> None:
    vit = build_encoder(ModelOptions(encoder="vit-tiny", width=64, depth=1, patch=4), 3, 8)
    assert isinstance(vit, Encoder)
    with pytest.raises(UserError, match="this encoder is 'vit-tiny'; give a ResNet"):
        make_detector(vit, 1, DetectionOptions())
