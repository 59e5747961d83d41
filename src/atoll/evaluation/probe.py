"""Linear probe: the accuracy of a linear classifier on frozen features."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atoll.core.devices import upload
from atoll.core.errors import UserError
from atoll.core.optimizers import SGD, Adam, AdamW
from atoll.core.threads import one_thread
from atoll.evaluation.knn import check_labelled
from atoll.evaluation.protocols import ProbeProtocol


@dataclass(frozen=True)
class SelectedAccuracy:
    """Accuracy of a classifier that was trained for several epochs.

    Attributes:
        accuracy: Test accuracy, in [0, 1], at the epoch that the protocol selects.
        epoch: The selected epoch, from 1.
        last_accuracy: Test accuracy after the last epoch.
    """

    accuracy: float
    epoch: int
    last_accuracy: float


@dataclass(frozen=True)
class ProbeResult(SelectedAccuracy):
    """Result of a linear probe.

    Attributes:
        protocol: Constants of the protocol.
        predictions: Predicted classes of the test samples at the selected epoch, (M,) int64.
    """

    protocol: ProbeProtocol
    predictions: Tensor = field(repr=False, compare=False)


def linear_probe(
    train_h: Tensor,
    train_y: Tensor,
    test_h: Tensor,
    test_y: Tensor,
    protocol: ProbeProtocol,
    generator: torch.Generator,
) -> ProbeResult:
    """Train a linear classifier on features and compute its test accuracy.

    The features are fixed, so an epoch is a pass over a matrix. On the CPU the computation uses one thread, and
    its result depends only on the features and the generator.

    Args:
        train_h: Features of the training samples.
        train_y: Classes of the training samples.
        test_h: Features of the test samples.
        test_y: Classes of the test samples.
        protocol: Constants of the protocol.
        generator: Source of the random draws, on the CPU: initial weights, and the order of every epoch.

    Shape:
        - train_h: (N, d); train_y: (N,) int
        - test_h: (M, d); test_y: (M,) int

    Raises:
        ValueError: The shapes do not match, or a label is not a class.
        UserError: The classifier diverged.

    Example:
        >>> import torch
        >>> from atoll.evaluation import find_probe, linear_probe
        >>> h, y = torch.eye(2).repeat(50, 1), torch.tensor([0, 1]).repeat(50)
        >>> protocol = find_probe("ssd", epochs=10, lr=0.1)
        >>> linear_probe(h, y, h, y, protocol, torch.Generator().manual_seed(0)).accuracy
        1.0
    """
    classes = check_labelled(train_h, train_y, test_h, test_y)
    train_h, test_h = train_h.detach().float(), test_h.detach().float()
    train_y, test_y = train_y.to(train_h.device, torch.long), test_y.to(test_h.device, torch.long)
    if protocol.standardise:
        mean, std = train_h.mean(0), train_h.std(0, correction=0)
        # A feature that is constant here may vary on the test images; divided by almost 0, it would dominate all
        # others.
        std = torch.where(std > 1e-6 * train_h.abs().amax(0), std, 1.0)
        train_h, test_h = (train_h - mean) / std, (test_h - mean) / std
    accuracy, best, best_epoch = 0.0, -1.0, 0
    with one_thread(train_h.device):
        for epoch, (weight, bias) in enumerate(
            train_linear(train_h, train_y, classes, protocol, generator), start=1
        ):
            if epoch == protocol.epochs or protocol.select == "best":
                predictions = F.linear(test_h, weight, bias).argmax(1)
                accuracy = int((predictions == test_y).sum()) / len(test_y)
                if accuracy > best:
                    best, best_epoch, selected = accuracy, epoch, predictions
        if not (weight.isfinite().all() and bias.isfinite().all()):
            raise UserError(
                f"the linear probe {protocol.name!r} diverged at learning rate {protocol.lr}; "
                "set evaluation.probe_standardise = true or a lower evaluation.probe_lr"
            )
    return ProbeResult(best, best_epoch, accuracy, protocol, selected)


def train_linear(
    h: Tensor, y: Tensor, classes: int, protocol: ProbeProtocol, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Train a linear classifier and yield its weight and bias after every epoch.

    The next epoch changes both in place.

    Args:
        h: Features.
        y: Classes.
        classes: Number of classes.
        protocol: Constants of the protocol.
        generator: Source of the random draws, on the CPU.

    Shape:
        - h: (N, d); y: (N,) int64
        - Each item: (classes, d) and (classes,)
    """
    weight, bias = first_weights(h.shape[1], classes, generator, h.device)
    optimizer = _optimizer(protocol, [weight, bias])
    batch = torch.empty(min(protocol.batch_size, len(h)), h.shape[1], device=h.device)
    for epoch in range(protocol.epochs):
        order = torch.randperm(len(h), generator=generator) if protocol.shuffle else torch.arange(len(h))
        order = upload(order, h.device)
        for start in range(0, len(h), protocol.batch_size):
            optimizer.param_groups[0]["lr"] = learning_rate(protocol, epoch, start / len(h))
            rows = order[start : start + protocol.batch_size]
            # One buffer serves all batches: allocating megabytes in each step would cost more than the step.
            x = torch.index_select(h, 0, rows, out=batch[: len(rows)])
            with torch.enable_grad():
                loss = F.cross_entropy(F.linear(x, weight, bias), y[rows])
                weight.grad, bias.grad = torch.autograd.grad(loss, (weight, bias))
            optimizer.step()
        yield weight.detach(), bias.detach()


def learning_rate(protocol: ProbeProtocol, epoch: int, part: float) -> float:
    """Learning rate within an epoch.

    Args:
        protocol: Constants of the protocol.
        epoch: The epoch, counted from 0.
        part: Share of the epoch that is complete, in [0, 1).
    """
    if protocol.schedule == "cosine":
        return 0.5 * protocol.lr * (1 + math.cos(math.pi * (epoch + part) / protocol.epochs))
    if protocol.schedule == "step":
        return protocol.lr * protocol.decay ** sum(epoch >= milestone for milestone in protocol.milestones)
    return protocol.lr


def first_weights(
    width: int, classes: int, generator: torch.Generator, device: torch.device
) -> tuple[nn.Parameter, nn.Parameter]:
    """Initial weight and bias of a linear layer, uniform in ±1/√width as in PyTorch, drawn from a generator."""
    bound = 1 / math.sqrt(width)
    weight = torch.empty(classes, width).uniform_(-bound, bound, generator=generator)
    bias = torch.empty(classes).uniform_(-bound, bound, generator=generator)
    return nn.Parameter(weight.to(device)), nn.Parameter(bias.to(device))


def _optimizer(protocol: ProbeProtocol, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if protocol.optimizer in ("adam", "adamw"):
        kind = Adam if protocol.optimizer == "adam" else AdamW
        return kind(parameters, protocol.lr, weight_decay=protocol.weight_decay, fused=True)
    return SGD(
        parameters,
        protocol.lr,
        protocol.momentum,
        weight_decay=protocol.weight_decay,
        nesterov=protocol.nesterov,
        fused=True,
    )
