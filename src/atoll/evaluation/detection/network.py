"""torchvision's Faster R-CNN and Mask R-CNN on a feature pyramid over one of our ResNets.

References:
    Ren et al., "Faster R-CNN", NeurIPS 2015, https://arxiv.org/abs/1506.01497.
    He et al., "Mask R-CNN", ICCV 2017, https://arxiv.org/abs/1703.06870.
    Lin et al., "Feature Pyramid Networks for Object Detection", CVPR 2017, https://arxiv.org/abs/1612.03144.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection import FasterRCNN, MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.ops import FeaturePyramidNetwork, MultiScaleRoIAlign

from atoll.core.errors import UserError
from atoll.evaluation.detection.options import DetectionOptions
from atoll.models import Encoder
from atoll.models.resnet import ResNet

STRIDES = (4, 8, 16, 32, 64)  # strides of the pyramid's levels, as in torchvision, for every stem
ANCHOR = 8  # side of a level's anchors, in its strides: 32 pixels at stride 4, up to 512 at stride 64
RATIOS = (0.5, 1.0, 2.0)
MASK_LAYERS = 4


class PyramidBackbone(nn.Module):
    """Feature pyramid over a ResNet, with levels of stride 4, 8, 16, 32 and 64.

    The pyramid joins the encoder's stages of these strides. Coarser levels that the encoder does not have are
    subsampled from the coarsest, as torchvision's pyramid does for stride 64; with the stem for small images, whose
    stages have strides 1 to 8, the first two stages feed the later ones only.

    Args:
        encoder: The encoder, which is trained further.
        width: Channels of every level.
        frozen: Keep the encoder's BatchNorm as it is.

    Attributes:
        levels: Strides of the levels that join a stage.

    Shape:
        - Input: (N, channels, H, W)
        - Output: a dict with the levels ``"0"`` to ``"4"``, each (N, width, ⌈H / stride⌉, ⌈W / stride⌉)
    """

    def __init__(self, encoder: ResNet, width: int, frozen: bool = False) -> None:
        super().__init__()
        self.encoder = encoder
        self.out_channels = width
        self._frozen = frozen
        shapes = stage_shapes(encoder)
        self._stages = [i for i, (_, stride) in enumerate(shapes) if stride in STRIDES]
        self.levels = [shapes[i][1] for i in self._stages]
        self.fpn = FeaturePyramidNetwork([shapes[i][0] for i in self._stages], width)
        if frozen:
            for norm in self._norms():
                norm.requires_grad_(False)

    def _norms(self) -> list[nn.Module]:
        return [module for module in self.encoder.modules() if isinstance(module, nn.BatchNorm2d)]

    def train(self, mode: bool = True) -> PyramidBackbone:
        """Set the mode of training; a frozen BatchNorm stays in evaluation mode."""
        super().train(mode)
        if self._frozen:
            for norm in self._norms():
                norm.eval()
        return self

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Compute the pyramid's levels, the finest first."""
        maps = self.encoder.stage_maps(images)
        pyramid = list(self.fpn({str(level): maps[i] for level, i in enumerate(self._stages)}).values())
        while len(pyramid) < len(STRIDES):
            pyramid.append(F.max_pool2d(pyramid[-1], kernel_size=1, stride=2))
        return {str(level): maps for level, maps in enumerate(pyramid)}


def stage_shapes(encoder: ResNet) -> list[tuple[int, int]]:
    """Measure the channels and the stride of a ResNet's stages."""
    side = STRIDES[-1]
    training = encoder.training
    with torch.no_grad():
        image = torch.zeros(1, encoder.conv1.in_channels, side, side, device=encoder.conv1.weight.device)
        maps = encoder.eval().stage_maps(image)
    encoder.train(training)
    return [(one.shape[1], side // one.shape[2]) for one in maps]


def make_detector(encoder: Encoder, classes: int, options: DetectionOptions) -> FasterRCNN:
    """Build a detector over an encoder; the new layers' weights are drawn from torch's default generator.

    Args:
        encoder: The encoder, a ResNet; its metadata holds the normalisation of its input.
        classes: Number of classes without the background.
        options: The options of the network.

    Raises:
        UserError: The encoder is no ResNet.
    """
    if not isinstance(encoder, ResNet):
        raise UserError(
            f"detection joins a ResNet's stages into a feature pyramid, and this encoder is "
            f"{encoder.spec.get('encoder', type(encoder).__name__)!r}; give a ResNet"
        )
    width = options.fpn_width or min(256, encoder.dim // 2)
    head = options.head_width or 4 * width
    channels = encoder.conv1.in_channels
    backbone = PyramidBackbone(encoder, width, options.norm == "frozen")
    names = [str(level) for level in range(len(backbone.levels))]
    box_pool = MultiScaleRoIAlign(names, output_size=7, sampling_ratio=2)
    parts: dict[str, Any] = {
        "min_size": options.size,
        "max_size": options.max_size,
        "image_mean": list(encoder.metadata.get("mean") or [0.0] * channels),
        "image_std": list(encoder.metadata.get("std") or [1.0] * channels),
        "rpn_anchor_generator": AnchorGenerator(
            tuple((ANCHOR * stride,) for stride in STRIDES), (RATIOS,) * len(STRIDES)
        ),
        "box_roi_pool": box_pool,
        "box_head": TwoMLPHead(width * box_pool.output_size[0] * box_pool.output_size[1], head),
        "box_predictor": FastRCNNPredictor(head, classes + 1),
        "box_batch_size_per_image": options.rois,
    }
    if not options.masks:
        return FasterRCNN(backbone, **parts)
    return MaskRCNN(
        backbone,
        **parts,
        mask_roi_pool=MultiScaleRoIAlign(names, output_size=14, sampling_ratio=2),
        mask_head=MaskRCNNHeads(width, (width,) * MASK_LAYERS, 1),
        mask_predictor=MaskRCNNPredictor(width, width, classes + 1),
    )
