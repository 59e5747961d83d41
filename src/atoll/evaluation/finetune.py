"""Fine-tuning with few labels: training the encoder and a head on 10 % or 1 % of the labels."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atoll.core.devices import upload
from atoll.data.images import ImageSet, Pixels
from atoll.evaluation.embed import device_of, embed
from atoll.evaluation.probe import SelectedAccuracy, first_weights
from atoll.evaluation.protocols import FineTuneProtocol


@dataclass(frozen=True)
class FineTuneResult(SelectedAccuracy):
    """Result of fine-tuning.

    Attributes:
        labels: Number of labels used.
        protocol: Constants of the protocol.
    """

    labels: int
    protocol: FineTuneProtocol


def label_subset(labels: Tensor, fraction: float, generator: torch.Generator) -> Tensor:
    """Draw a stratified share of the labels: for each class the nearest whole number, and at least one.

    Args:
        labels: The class of each sample.
        fraction: Share of each class to draw.
        generator: Source of the random draws, on the CPU.

    Shape:
        - labels: (N,) int
        - Output: (n,) int64, the indices of the chosen samples, ascending

    Example:
        >>> import torch
        >>> from atoll.evaluation import label_subset
        >>> labels = torch.tensor([0, 1]).repeat(50)
        >>> chosen = label_subset(labels, 0.1, torch.Generator().manual_seed(0))
        >>> labels[chosen].bincount()
        tensor([5, 5])
    """
    chosen = []
    for label in labels.bincount().nonzero():
        rows = (labels == label).nonzero().squeeze(1)
        count = max(1, round(fraction * len(rows)))
        chosen.append(rows[torch.randperm(len(rows), generator=generator)[:count]])
    return torch.cat(chosen).sort().values


def finetune(
    encoder: nn.Module,
    train: ImageSet,
    test: ImageSet,
    protocol: FineTuneProtocol,
    generator: torch.Generator,
    *,
    augment: Callable[[Tensor, torch.Generator], Tensor],
    pixels_to_float: Callable[[Tensor], Tensor],
    device: torch.device | str | None = None,
) -> FineTuneResult:
    """Train a copy of the encoder with a head on few labels; the encoder itself stays unchanged.

    Args:
        encoder: The encoder from which fine-tuning starts.
        train: Labelled images, of which the protocol's fraction is used.
        test: Labelled images.
        protocol: Constants of the protocol.
        generator: Source of the random draws, on the CPU: labels, initial weights of the head, order and views.
        augment: Converts a uint8 batch to the encoder's input for training, with random draws from a generator.
        pixels_to_float: Converts a uint8 batch to the encoder's input for testing.
        device: Device of the computation; None for the encoder's device.

    Raises:
        ValueError: A set has no labels, or a label is not a class.

    Reference:
        SSD's released code, semi_eval.py; FedCA, "Semi-Supervised Learning".
    """
    if train.labels is None or test.labels is None:
        raise ValueError("fine-tuning needs labels for the training images and for the test images")
    device = torch.device(device) if device is not None else device_of(encoder)
    chosen = label_subset(train.labels, protocol.fraction, generator)
    labels, truth = train.labels.to(device), test.labels.to(device)
    model = copy.deepcopy(encoder).to(device).requires_grad_(True)

    def features(images: Pixels) -> Tensor:
        return embed(model, pixels_to_float, images, batch_size=protocol.batch_size, device=device)

    width = features(test.subset(torch.arange(1)).images).shape[1]
    classes = 1 + int(max(labels.max(), truth.max()))
    head = [
        first_weights(before, after, generator, device)
        for before, after in pairwise([width, *protocol.hidden, classes])
    ]

    def classify(h: Tensor) -> Tensor:
        *hidden, last = head
        for layer in hidden:
            h = F.relu(F.linear(h, *layer))
        return F.linear(h, *last)

    groups = [
        {"params": list(model.parameters()), "lr": protocol.encoder_lr},
        {"params": [parameter for layer in head for parameter in layer], "lr": protocol.head_lr},
    ]
    adam = protocol.optimizer == "adam"
    optimizer = torch.optim.Adam(groups) if adam else torch.optim.SGD(groups, momentum=protocol.momentum)
    accuracy, best, best_epoch = 0.0, -1.0, 0
    for epoch in range(1, protocol.epochs + 1):
        model.train()
        order = chosen[torch.randperm(len(chosen), generator=generator)]
        for start in range(0, len(order), protocol.batch_size):
            rows = order[start : start + protocol.batch_size]
            if len(rows) < 2:  # BatchNorm cannot normalise one image
                continue
            x = augment(upload(train.images.gather(rows), device), generator)
            with torch.enable_grad():
                loss = F.cross_entropy(classify(model(x)), labels[upload(rows, device)])
                optimizer.zero_grad()
                torch.autograd.backward(loss)
            optimizer.step()
        last = epoch == protocol.epochs
        if last or (protocol.select == "best" and epoch % protocol.every == 0):
            with torch.no_grad():
                logits = classify(features(test.images))
            accuracy = int((logits.argmax(1) == truth).sum()) / len(truth)
            if accuracy > best:
                best, best_epoch = accuracy, epoch
    return FineTuneResult(best, best_epoch, accuracy, len(chosen), protocol)
