"""Client-local test: every client is tested on its share of the test images, with the model that it uses.

The shares follow the clients' training images: a client receives the same share of a class's test images as it
holds of the class's training images. If clients hold disjoint classes, each is thus tested only on its own classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from atoll.data.images import ImageSet

PREFIX = "clients-"  # starts the name of every client-local protocol
_ERROR = 1e-9  # of a whole number of images, by rounding
_LISTS = ("clients", "accuracies", "images")


def split_test(
    train: ImageSet, test: ImageSet, client_ids: Tensor, column: str | None, generator: torch.Generator
) -> dict[int, Tensor]:
    """Split test images among clients in proportion to the training images that they hold.

    Images are split within a stratum: a class, or a class and a value of ``column`` if both sets have it. In every
    stratum, a client's share is rounded up or down; later strata compensate for the rounding of earlier ones.

    Args:
        train: Training images.
        test: Test images.
        client_ids: Client of each training image; −1 for none.
        column: Column that determines the clients, such as a domain; None if only the classes count.
        generator: Source of the random draws.

    Shape:
        - client_ids: (N,) int, N training images

    Returns:
        For each client, the rows of its test images, ascending; clients without test images are absent. If no
        client holds a training image of a stratum, its test images are in no share.

    Reference:
        Wang et al., "Does Learning from Decentralized Non-IID Unlabeled Data Benefit from Self Supervision?", ICLR
        2023, C.1: "we test on each local dataset using the corresponding cluster model".

    Example:
        >>> import torch
        >>> from atoll.data.images import ImageSet, StoredPixels
        >>> from atoll.evaluation import split_test
        >>> pixels = StoredPixels(torch.zeros(4, 3, 8, 8, dtype=torch.uint8))
        >>> images = ImageSet(pixels, torch.tensor([0, 0, 1, 1]))
        >>> split_test(images, images, torch.tensor([0, 0, 0, 1]), None, torch.Generator().manual_seed(0))
        {0: tensor([0, 1, 3]), 1: tensor([2])}
    """
    held = client_ids >= 0
    if train.labels is None or test.labels is None or not held.any():
        return {}
    train_strata, test_strata = _strata(train, test, column)
    clients = int(client_ids.max()) + 1
    owed = torch.zeros(clients, dtype=torch.float64)
    owners = torch.full((len(test),), -1)
    for stratum in torch.unique(test_strata).tolist():
        rows = (test_strata == stratum).nonzero().squeeze(1)
        sizes = torch.bincount(client_ids[held & (train_strata == stratum)], minlength=clients).double()
        if not sizes.any():
            continue
        quotas = sizes / sizes.sum() * len(rows)
        counts = (quotas + _ERROR).floor()
        missing = len(rows) - int(counts.sum())
        rest = quotas - counts
        wishes = torch.where(rest > _ERROR, owed + rest, -math.inf)  # a whole share is not rounded
        counts[wishes.argsort(descending=True, stable=True)[:missing]] += 1
        owed += quotas - counts
        shuffled = rows[torch.randperm(len(rows), generator=generator)]
        owners[shuffled] = torch.repeat_interleave(torch.arange(clients), counts.long())
    shares = {client: (owners == client).nonzero().squeeze(1) for client in range(clients)}
    return {client: rows for client, rows in shares.items() if len(rows)}


def _strata(train: ImageSet, test: ImageSet, column: str | None) -> tuple[Tensor, Tensor]:
    """Number the strata, the same way for both sets."""
    names = [column] if column in train.columns and column in test.columns else []
    rows = [
        torch.stack([_labels(images), *(images.columns[name] for name in names)], 1)
        for images in (train, test)
    ]
    numbers = torch.unique(torch.cat(rows), dim=0, return_inverse=True)[1]
    return numbers[: len(train)], numbers[len(train) :]


def _labels(images: ImageSet) -> Tensor:
    assert images.labels is not None  # noqa: S101 - `split_test` has checked this
    return images.labels


def client_accuracies(correct: Tensor, shares: Mapping[int, Tensor]) -> dict[str, Any]:
    """Compute the accuracy of each client on its share of the test images, and their summary.

    Args:
        correct: Whether each test image is classified correctly.
        shares: The rows of each client's test images.

    Shape:
        - correct: (M,) bool

    Returns:
        ``"clients"``, ``"accuracies"`` and ``"images"``, one number for each client, and the result of `summary`.

    Example:
        >>> import torch
        >>> from atoll.evaluation import client_accuracies
        >>> correct = torch.tensor([True, True, True, False])
        >>> found = client_accuracies(correct, {0: torch.tensor([0, 1]), 1: torch.tensor([2, 3])})
        >>> found["accuracies"], found["accuracy"], found["worst_accuracy"], found["accuracy_std"]
        ([1.0, 0.5], 0.75, 0.5, 0.25)
    """
    correct = correct.cpu()
    images = [len(rows) for rows in shares.values()]
    accuracies = [int(correct[rows].sum()) / len(rows) for rows in shares.values()]
    return {
        "clients": [float(client) for client in shares],
        "accuracies": accuracies,
        "images": [float(size) for size in images],
        **summary(accuracies, images),
    }


def summary(accuracies: Sequence[float], images: Sequence[float]) -> dict[str, float]:
    """Summarise the clients' accuracies.

    Args:
        accuracies: Accuracy of each client.
        images: Number of test images of each client.

    Returns:
        ``"accuracy"``, the mean over clients; ``"weighted_accuracy"``, the mean over images; ``"worst_accuracy"``;
        and ``"accuracy_std"``, the standard deviation over clients (the root of the mean squared deviation).
        Empty if there are no clients.
    """
    if not accuracies:
        return {}
    mean = fmean(accuracies)
    variance = fmean((accuracy - mean) ** 2 for accuracy in accuracies)
    weighted = math.fsum(a * n for a, n in zip(accuracies, images, strict=True)) / math.fsum(images)
    return {
        "accuracy": mean,
        "weighted_accuracy": weighted,
        "worst_accuracy": min(accuracies),
        "accuracy_std": math.sqrt(variance),
    }


def by_client(results: Mapping[str, Any]) -> dict[float, dict[str, Any]]:
    """Collect each client's accuracies, as ``"probe/accuracy"``, and its number of test images, as ``"images"``.

    Args:
        results: The results of `evaluate` or of `mean_over_clients`.
    """
    found: dict[float, dict[str, Any]] = {}
    for protocol in tested(results):
        lists = (results[f"{PREFIX}{protocol}/{name}"] for name in _LISTS)
        for client, accuracy, images in zip(*lists, strict=True):
            found.setdefault(client, {"images": int(images)})[f"{protocol}/accuracy"] = accuracy
    return found


def tested(results: Mapping[str, Any]) -> list[str]:
    """Name the protocols under which each client was tested, without the prefix."""
    end = f"/{_LISTS[0]}"
    return [key[len(PREFIX) : -len(end)] for key in results if key.startswith(PREFIX) and key.endswith(end)]


def join_models(by_model: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the client-local results of several models, each tested on its own clients' images.

    Args:
        by_model: The results of `evaluate` for each model.

    Returns:
        For each client-local protocol, the values of `client_accuracies` over the clients of all models.
    """
    joined: dict[str, Any] = {}
    for protocol in dict.fromkeys(name for results in by_model for name in tested(results)):
        keys = [f"{PREFIX}{protocol}/{name}" for name in _LISTS]
        rows = sorted(
            row for results in by_model for row in zip(*(results[key] for key in keys), strict=True)
        )
        lists = [list(values) for values in zip(*rows, strict=True)] or [[], [], []]
        joined |= dict(zip(keys, lists, strict=True))
        joined |= {f"{PREFIX}{protocol}/{name}": value for name, value in summary(lists[1], lists[2]).items()}
    return joined
