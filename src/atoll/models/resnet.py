"""ResNets for small images: torchvision's blocks behind a stem for small images.

References:
    He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, https://arxiv.org/abs/1512.03385.
    The CIFAR stem: Chen et al., "A Simple Framework for Contrastive Learning", ICML 2020, appendix B.9.
"""

from __future__ import annotations

from collections.abc import Sequence

import torchvision
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.resnet import BasicBlock

from atoll.core.errors import UserError
from atoll.models.encoder import Encoder, graft

Stem = tuple[nn.Conv2d, nn.Module]


class ResNet(Encoder):
    """ResNet without its classifier; its parameters have torchvision's names, so torchvision's weights match.

    Args:
        stem: The first convolution, and the pooling after its norm and ReLU.
        stages: The residual stages, named ``layer1``, ``layer2`` and so on.
        dim: Channels of the last stage.
    """

    def __init__(self, stem: Stem, stages: Sequence[nn.Module], dim: int) -> None:
        super().__init__(dim)
        self.conv1, self.maxpool = stem
        self.bn1 = nn.BatchNorm2d(self.conv1.out_channels)
        self.stages = [f"layer{i}" for i in range(1, len(stages) + 1)]
        for name, stage in zip(self.stages, stages, strict=True):
            self.add_module(name, stage)

    def feature_maps(self, images: Tensor) -> Tensor:
        """Compute the feature maps before the global average pooling, which L-DAWA's linear probe reads.

        Args:
            images: A batch of images.

        Shape:
            - Output: (N, dim, H, W); 4×4 maps for ResNet-18 with the CIFAR stem on 32×32 images.
        """
        return self.stage_maps(images)[-1]

    def stage_maps(self, images: Tensor) -> list[Tensor]:
        """Compute the feature maps after every stage, which a feature pyramid reads.

        Args:
            images: A batch of images, of any height and width.

        Shape:
            - Output: for each stage (N, channels, H, W), the finest first; the last one has ``dim`` channels.
        """
        maps: Tensor = self.maxpool(F.relu(self.bn1(self.conv1(images)), inplace=True))
        found = []
        for name in self.stages:
            maps = getattr(self, name)(maps)
            found.append(maps)
        return found

    def forward(self, images: Tensor) -> Tensor:
        """Compute the feature maps and average them over the image."""
        return self.feature_maps(images).mean((2, 3))


def _cifar_stem(channels: int, width: int) -> Stem:
    return nn.Conv2d(channels, width, 3, stride=1, padding=1, bias=False), nn.Identity()


def _strided_stem(channels: int, width: int) -> Stem:
    return nn.Conv2d(channels, width, 3, stride=2, padding=1, bias=False), nn.Identity()


def _standard_stem(channels: int, width: int) -> Stem:
    return nn.Conv2d(channels, width, 7, stride=2, padding=3, bias=False), nn.MaxPool2d(
        3, stride=2, padding=1
    )


STEMS = {"cifar": _cifar_stem, "strided": _strided_stem, "standard": _standard_stem}


def torchvision_resnet(name: str, stem: str, channels: int, init: str) -> ResNet:
    """Build a torchvision ResNet without its classifier and with another stem.

    Args:
        name: Its name in torchvision: ``resnet18``, ``resnet34`` or ``resnet50``.
        stem: A name in `STEMS`.
        channels: Channels of the images.
        init: ``"random"``, or ``"torchvision"`` for its ImageNet weights, downloaded unless they are cached.

    Raises:
        UserError: The weights are neither in torch's cache nor downloadable.
    """
    original = torchvision.models.get_model(name, weights=None)
    stages = [original.layer1, original.layer2, original.layer3, original.layer4]
    encoder = ResNet(STEMS[stem](channels, 64), stages, original.fc.in_features)
    _initialise(encoder.conv1)
    if init == "torchvision":
        try:
            state = torchvision.models.get_model_weights(name).DEFAULT.get_state_dict(progress=False)
        except OSError as error:
            raise UserError(
                f"the torchvision weights of {name} could not be downloaded ({error}): connect once, "
                "put the file into torch's cache yourself, or use model.init = 'random'"
            ) from error
        graft(encoder, state, f"torchvision's {name}")
    return encoder


def narrow_resnet(stem: str, width: int, channels: int) -> ResNet:
    """Build a ResNet-10 that is small enough to train on a CPU: four stages of one basic block each.

    Args:
        stem: A name in `STEMS`.
        width: Channels of the first stage; each further stage doubles them.
        channels: Channels of the images.

    Shape:
        - Output: (N, 8 · width)
    """
    widths = [width, 2 * width, 4 * width, 8 * width]
    before = [width, *widths[:-1]]
    strides = [1, 2, 2, 2]
    stages = [nn.Sequential(_block(*shape)) for shape in zip(before, widths, strides, strict=True)]
    encoder = ResNet(STEMS[stem](channels, width), stages, widths[-1])
    _initialise(encoder)
    return encoder


def _block(before: int, after: int, stride: int) -> BasicBlock:
    if stride == 1 and before == after:
        return BasicBlock(before, after)
    shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
    return BasicBlock(before, after, stride, shortcut)


def _initialise(module: nn.Module) -> None:
    """Apply He initialisation over the fan-out, as torchvision does for its ResNets."""
    for submodule in module.modules():
        if isinstance(submodule, nn.Conv2d):
            nn.init.kaiming_normal_(submodule.weight, mode="fan_out", nonlinearity="relu")
