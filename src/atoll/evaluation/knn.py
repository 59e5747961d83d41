"""Weighted k-nearest-neighbour classifier, which evaluates a representation without training."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.core.errors import warn
from atoll.evaluation.neighbours import nearest_blocks


def knn_accuracy(
    train_h: Tensor,
    train_y: Tensor,
    test_h: Tensor,
    test_y: Tensor,
    k: int = 200,
    temperature: float = 0.1,
    num_classes: int | None = None,
) -> float:
    """Accuracy of a k-nearest-neighbour classifier on the test samples; see `knn_predictions`.

    Args:
        train_h: Features of the training samples.
        train_y: Classes of the training samples.
        test_h: Features of the test samples.
        test_y: Classes of the test samples.
        k: Number of neighbours that vote.
        temperature: Scale of the votes.
        num_classes: Number of classes; by default, one more than the largest label.

    Shape:
        - train_h: (N, d); train_y: (N,) int
        - test_h: (M, d); test_y: (M,) int

    Raises:
        ValueError: The shapes do not match, a label is not a class, or k or the temperature is not positive.

    Reference:
        Wu et al., "Unsupervised Feature Learning via Non-Parametric Instance Discrimination", CVPR 2018,
        section 3.4, https://arxiv.org/abs/1805.01978.

    Example:
        >>> import torch
        >>> from atoll.evaluation import knn_accuracy
        >>> train_h, train_y = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1])
        >>> test_h, test_y = torch.tensor([[2.0, 1.0], [1.0, 2.0]]), torch.tensor([0, 0])
        >>> knn_accuracy(train_h, train_y, test_h, test_y, k=1)
        0.5
    """
    predictions = knn_predictions(train_h, train_y, test_h, test_y, k, temperature, num_classes)
    return int((predictions == test_y.to(predictions.device)).sum()) / len(test_y)


def knn_predictions(
    train_h: Tensor,
    train_y: Tensor,
    test_h: Tensor,
    test_y: Tensor,
    k: int = 200,
    temperature: float = 0.1,
    num_classes: int | None = None,
) -> Tensor:
    """Predict the classes of the test samples by a vote of their k nearest training samples.

    Neighbours are ranked by cosine similarity, and a neighbour's vote has the weight exp(cosine / temperature).
    Among equally near neighbours the first ones vote, and among classes with equal votes the lowest label wins.
    With fewer than k training samples, all of them vote, and the function warns.

    Args:
        train_h: Features of the training samples.
        train_y: Classes of the training samples.
        test_h: Features of the test samples.
        test_y: Classes of the test samples, which only determine the number of classes.
        k: Number of neighbours that vote.
        temperature: Scale of the votes.
        num_classes: Number of classes; by default, one more than the largest label.

    Shape:
        - train_h: (N, d); train_y: (N,) int
        - test_h: (M, d); test_y: (M,) int
        - Output: (M,) int64

    Raises:
        ValueError: The shapes do not match, a label is not a class, or k or the temperature is not positive.
    """
    classes = check_labelled(train_h, train_y, test_h, test_y)
    num_classes = classes if num_classes is None else num_classes
    if classes > num_classes:
        raise ValueError(f"labels go up to {classes - 1}, and num_classes is {num_classes}")
    if k < 1 or not temperature > 0:
        raise ValueError(f"k ({k}) and temperature ({temperature}) must be positive")
    if k > len(train_h):
        warn(f"kNN needs {k} neighbours and there are {len(train_h)} training samples; all of them vote")
    labels = train_y.to(train_h.device, torch.long)
    predictions = []
    for similarity, neighbours in nearest_blocks(train_h, test_h, k):
        # Relative to the nearest neighbour, so that exp never overflows; a common factor does not change the
        # result.
        weight = ((similarity - similarity[:, :1]) / temperature).exp()
        votes = weight.new_zeros(len(weight), num_classes).scatter_add_(1, labels[neighbours], weight)
        predictions.append(votes.argmax(1))
    return torch.cat(predictions)


def check_labelled(train_h: Tensor, train_y: Tensor, test_h: Tensor, test_y: Tensor) -> int:
    """Check that two labelled feature sets match, and return the number of classes.

    Args:
        train_h: Features of the training samples.
        train_y: Classes of the training samples.
        test_h: Features of the test samples.
        test_y: Classes of the test samples.

    Raises:
        ValueError: The sets do not match, a set is empty, or a label is not a class.
    """
    shapes = [tuple(each.shape) for each in (train_h, train_y, test_h, test_y)]
    expected = [
        (len(train_y), train_h.shape[-1]),
        (len(train_h),),
        (len(test_y), train_h.shape[-1]),
        (len(test_h),),
    ]
    if shapes != expected or not len(train_h) or not len(test_h):
        raise ValueError(
            "labelled features must be (N, d) and (N,) for training, (M, d) and (M,) for the test, none of them "
            f"empty; got {shapes[0]} and {shapes[1]}, {shapes[2]} and {shapes[3]}"
        )
    if any(y.is_floating_point() or int(y.min()) < 0 for y in (train_y, test_y)):
        raise ValueError("labels must be integers from 0 upwards")
    return 1 + max(int(train_y.max()), int(test_y.max()))
