"""Fine-tuning with few labels: training the encoder and a head on a share or a number of the labels."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atoll.core.devices import upload
from atoll.core.errors import UserError, warn
from atoll.core.optimizers import SGD, Adam
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


def label_subset(
    labels: Tensor, fraction: float, generator: torch.Generator, label_count: int | None = None
) -> Tensor:
    """Draw a stratified share, or number, of the labels, with at least one label of each class.

    A share is rounded to the nearest whole number in each class; a number is divided among the classes in
    proportion to their sizes. The function warns if it cannot draw that number: if there are fewer labels, it draws
    all, and if there are more classes, one label of each.

    Args:
        labels: The class of each sample.
        fraction: Share of each class to draw.
        generator: Source of the random draws, on the CPU.
        label_count: Number of labels to draw in place of a share; None to draw the share.

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
    sizes = labels.bincount()
    if label_count is None:
        counts = [max(1, round(fraction * size)) for size in sizes.tolist()]
    else:
        if label_count > len(labels):
            warn(f"{label_count} labels are asked for and there are {len(labels)}; all count")
        if label_count < (classes := len(sizes.nonzero())):
            warn(f"{label_count} labels are asked for and there are {classes} classes; one of each counts")
        counts = _stratified(sizes, min(label_count, len(labels)))
    chosen = []
    for label in sizes.nonzero():
        rows = (labels == label).nonzero().squeeze(1)
        chosen.append(rows[torch.randperm(len(rows), generator=generator)[: counts[label]]])
    return torch.cat(chosen).sort().values


def _stratified(sizes: Tensor, total: int) -> list[int]:
    """Divide a number among classes in proportion to their sizes, with at least one for each class that exists."""
    quotas, counts = sizes.double() * (total / int(sizes.sum())), sizes.clamp(max=1)
    for _ in range(total - int(counts.sum())):
        counts[(quotas - counts).masked_fill(counts == sizes, -torch.inf).argmax()] += 1
    return [int(count) for count in counts]


class _Classifier(nn.Module):
    """A copy of an encoder with a head of linear layers with ReLU between them."""

    def __init__(self, encoder: nn.Module, head: Sequence[tuple[nn.Parameter, nn.Parameter]]) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.ParameterList([parameter for layer in head for parameter in layer])

    def classify(self, h: Tensor) -> Tensor:
        layers = list(zip(self.head[::2], self.head[1::2], strict=True))
        for layer in layers[:-1]:
            h = F.relu(F.linear(h, *layer))
        return F.linear(h, *layers[-1])

    def optimizer(self, protocol: FineTuneProtocol) -> torch.optim.Optimizer:
        groups = [
            {"params": list(self.encoder.parameters()), "lr": protocol.encoder_lr},
            {"params": list(self.head), "lr": protocol.head_lr},
        ]
        adam = protocol.optimizer == "adam"
        return Adam(groups) if adam else SGD(groups, momentum=protocol.momentum)


Augment = Callable[[Tensor, torch.Generator], Tensor]


@dataclass(frozen=True)
class _Training:
    """Everything that an epoch of fine-tuning reads."""

    train: ImageSet
    labels: Tensor
    protocol: FineTuneProtocol
    generator: torch.Generator
    augment: Augment
    device: torch.device

    def epochs(self, model: _Classifier, chosen: Tensor, count: int) -> Iterator[None]:
        """Train for some epochs on the chosen samples with a new optimiser; yields after each epoch."""
        optimizer, size = model.optimizer(self.protocol), self.protocol.batch_size
        for _ in range(count):
            model.train()
            order = chosen[torch.randperm(len(chosen), generator=self.generator)]
            for start in range(0, len(order), size):
                rows = order[start : start + size]
                if len(rows) < 2:  # BatchNorm cannot normalise one image
                    continue
                x = self.augment(upload(self.train.images.gather(rows), self.device), self.generator)
                with torch.enable_grad():
                    logits = model.classify(model.encoder(x))
                    loss = F.cross_entropy(logits, self.labels[upload(rows, self.device)])
                    optimizer.zero_grad()
                    torch.autograd.backward(loss)
                optimizer.step()
            yield

    def rounds(self, model: _Classifier, clients: Sequence[Tensor], local_epochs: int) -> Iterator[None]:
        """Train by FedAvg, weighted by the clients' numbers of labels; yields after a round, once per epoch."""
        if alone := sum(len(chosen) < 2 for chosen in clients):
            warn(
                f"{alone} of {len(clients)} clients have one label and take no step, because BatchNorm cannot "
                "normalise a batch of one image"
            )
        for _ in range(self.protocol.epochs // local_epochs):
            total = sum(map(len, clients))
            mean: dict[str, Tensor] = {}
            for chosen in clients:
                local = copy.deepcopy(model)
                for _ in self.epochs(local, chosen, local_epochs):
                    pass
                for name, value in local.state_dict().items():
                    if not value.is_floating_point():
                        # The mean of equal indices, rounded, could be 1 less; counters take their maximum.
                        mean[name] = torch.maximum(mean.get(name, value), value)
                        continue
                    share = value.double() * (len(chosen) / total)
                    mean[name] = mean[name] + share if name in mean else share
            model.load_state_dict(mean)
            for _ in range(local_epochs):
                yield


def finetune(
    encoder: nn.Module,
    train: ImageSet,
    test: ImageSet,
    protocol: FineTuneProtocol,
    generator: torch.Generator,
    *,
    augment: Augment,
    pixels_to_float: Callable[[Tensor], Tensor],
    device: torch.device | str | None = None,
    client_ids: Tensor | None = None,
) -> FineTuneResult:
    """Train a copy of the encoder with a head on few labels; the encoder itself stays unchanged.

    With ``protocol.local_epochs``, each client labels the protocol's share of its own images and trains on
    these; FedAvg averages the clients' models, including BatchNorm's statistics, weighted by their numbers of
    labels.

    Args:
        encoder: The encoder from which fine-tuning starts.
        train: Labelled images, of which the protocol's share or number is used.
        test: Labelled images.
        protocol: Constants of the protocol.
        generator: Source of the random draws, on the CPU: labels, initial weights of the head, order and views.
        augment: Converts a uint8 batch to the encoder's input for training, with random draws from a generator.
        pixels_to_float: Converts a uint8 batch to the encoder's input for testing.
        device: Device of the computation; None for the encoder's device.
        client_ids: The client that holds each training image, −1 for none; federated protocols need it.

    Shape:
        - client_ids: (N,) int

    Raises:
        ValueError: A set has no labels, a label is not a class, or a federated protocol has no clients.

    Reference:
        SSD's released code, semi_eval.py; FedCA, "Semi-Supervised Learning".
    """
    if train.labels is None or test.labels is None:
        raise ValueError("fine-tuning needs labels for the training images and for the test images")
    device = torch.device(device) if device is not None else device_of(encoder)
    clients = _labelled(train.labels, client_ids, protocol, generator)
    labels, truth = train.labels.to(device), test.labels.to(device)
    copied = copy.deepcopy(encoder).to(device)
    for weight in copied.parameters():
        weight.requires_grad_(weight.is_floating_point())

    def features(images: Pixels) -> Tensor:
        return embed(copied, pixels_to_float, images, batch_size=protocol.batch_size, device=device)

    width = features(test.subset(torch.arange(1)).images).shape[1]
    classes = 1 + int(max(labels.max(), truth.max()))
    head = [
        first_weights(before, after, generator, device)
        for before, after in pairwise([width, *protocol.hidden, classes])
    ]
    model = _Classifier(copied, head)
    training = _Training(train, labels, protocol, generator, augment, device)
    passes = (
        training.rounds(model, clients, protocol.local_epochs)
        if protocol.local_epochs
        else training.epochs(model, clients[0], protocol.epochs)
    )
    accuracy, best, best_epoch = 0.0, -1.0, 0
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        # Dropout and stochastic depth draw from the default generator.
        torch.manual_seed(generator.initial_seed())
        for epoch, _ in enumerate(passes, start=1):
            last = epoch == protocol.epochs
            if last or (protocol.select == "best" and epoch % protocol.every == 0):
                with torch.no_grad():
                    logits = model.classify(features(test.images))
                if not logits.isfinite().all():
                    raise UserError(
                        f"the fine-tuning diverged: after epoch {epoch}, its outputs are not finite"
                    )
                accuracy = int((logits.argmax(1) == truth).sum()) / len(truth)
                if accuracy > best:
                    best, best_epoch = accuracy, epoch
    return FineTuneResult(best, best_epoch, accuracy, sum(map(len, clients)), protocol)


def _labelled(
    labels: Tensor, client_ids: Tensor | None, protocol: FineTuneProtocol, generator: torch.Generator
) -> list[Tensor]:
    """Draw the labelled samples of each client, or of all images together if the protocol is not federated."""
    if not protocol.local_epochs:
        return [label_subset(labels, protocol.fraction, generator, protocol.label_count)]
    if client_ids is None or not bool((client_ids >= 0).any()):
        raise ValueError("federated fine-tuning needs the client of each training image")
    held = [
        (client_ids == client).nonzero().squeeze(1) for client in torch.unique(client_ids[client_ids >= 0])
    ]
    return [
        rows[label_subset(labels[rows], protocol.fraction, generator, protocol.label_count)] for rows in held
    ]
