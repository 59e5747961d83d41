"""ResNets, with stems for small images.

References:
    He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, https://arxiv.org/abs/1512.03385.
    The CIFAR stem: Chen et al., "A Simple Framework for Contrastive Learning", ICML 2020, appendix B.9.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from atoll.core.errors import UserError
from atoll.models.encoder import Encoder, graft
from atoll.models.libraries import TORCHVISION, torchvision_weights

Stem = tuple[nn.Conv2d, nn.Module]


class BasicBlock(nn.Module):
    """Residual block of two convolutions (He et al., Eq. 1 and 2; Fig. 5, left).

    Args:
        before: Channels of the input.
        width: Channels of the convolutions.
        stride: Stride of the block.
    """

    expansion = 1

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        shortcut = _shortcut(before, width, stride)  # drawn first, as by torchvision
        self.conv1 = nn.Conv2d(before, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = shortcut

    def forward(self, maps: Tensor) -> Tensor:
        """Add the input, or its projection, to what the convolutions compute."""
        out = F.relu(self.bn1(self.conv1(maps)), inplace=True)
        out = self.bn2(self.conv2(out))
        out += maps if self.downsample is None else self.downsample(maps)
        return F.relu(out, inplace=True)


class Bottleneck(nn.Module):
    """Residual block of three convolutions (He et al., Fig. 5, right), with the stride in the second one.

    Args:
        before: Channels of the input.
        width: Channels of the first two convolutions; the third has four times as many.
        stride: Stride of the block.
    """

    expansion = 4

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = self.expansion * width
        shortcut = _shortcut(before, after, stride)
        self.conv1 = nn.Conv2d(before, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, after, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(after)
        self.downsample = shortcut

    def forward(self, maps: Tensor) -> Tensor:
        """Add the input, or its projection, to what the convolutions compute."""
        out = F.relu(self.bn1(self.conv1(maps)), inplace=True)
        out = F.relu(self.bn2(self.conv2(out)), inplace=True)
        out = self.bn3(self.conv3(out))
        out += maps if self.downsample is None else self.downsample(maps)
        return F.relu(out, inplace=True)


def _shortcut(before: int, after: int, stride: int) -> nn.Module | None:
    """The projection of a block's input (He et al., option B), where its shape is not the output's."""
    if stride == 1 and before == after:
        return None
    return nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))


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
RESNETS: dict[str, tuple[type[BasicBlock | Bottleneck], tuple[int, int, int, int]]] = {
    "resnet18": (BasicBlock, (2, 2, 2, 2)),  # the block, and its number in each stage (He et al., Table 1)
    "resnet34": (BasicBlock, (3, 4, 6, 3)),
    "resnet50": (Bottleneck, (3, 4, 6, 3)),
}
STRIDES = 1, 2, 2, 2  # of the stages


def resnet(name: str, stem: str, channels: int, init: str) -> ResNet:
    """Build a ResNet of the paper without its classifier.

    Args:
        name: A name in `RESNETS`.
        stem: A name in `STEMS`.
        channels: Channels of the images.
        init: ``"random"``, or ``"torchvision"`` for its ImageNet weights, which are downloaded unless they are
            cached.

    Raises:
        UserError: The weights are neither in torch's cache nor downloadable.
    """
    block, counts = RESNETS[name]
    # Torchvision's first convolution and classifier are drawn, too, so that a seed gives torchvision's weights.
    first, before, stages = nn.Conv2d(3, 64, 7, bias=False), 64, []
    for width, count, stride in zip((64, 128, 256, 512), counts, STRIDES, strict=True):
        after = block.expansion * width
        stages.append(
            nn.Sequential(block(before, width, stride), *(block(after, width, 1) for _ in range(count - 1)))
        )
        before = after
    nn.Linear(before, 1000)
    _initialise(nn.ModuleList([first, *stages]))
    encoder = ResNet(STEMS[stem](channels, 64), stages, before)
    _initialise(encoder.conv1)
    if init == "torchvision":
        graft(encoder, _published(name), f"torchvision's {name}")
    return encoder


def _published(name: str) -> dict[str, Tensor]:
    try:
        return torchvision_weights(TORCHVISION + name)
    except OSError as error:
        raise UserError(
            f"the torchvision weights of {name} could not be downloaded ({error}): connect once, "
            "put the file into torch's cache yourself, or use model.init = 'random'"
        ) from error


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
    stages = [nn.Sequential(BasicBlock(*shape)) for shape in zip(before, widths, STRIDES, strict=True)]
    encoder = ResNet(STEMS[stem](channels, width), stages, widths[-1])
    _initialise(encoder)
    return encoder


def _initialise(module: nn.Module) -> None:
    """Apply He initialisation over the fan-out, as torchvision does for its ResNets."""
    for submodule in module.modules():
        if isinstance(submodule, nn.Conv2d):
            nn.init.kaiming_normal_(submodule.weight, mode="fan_out", nonlinearity="relu")
