"""Protocols of the user's code: functions that a recipe names as ``module:attribute``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from atoll.core.errors import UserError
from atoll.core.imports import describe_error, import_function
from atoll.core.process_state import process_kept
from atoll.core.text import one_line, type_words
from atoll.data.images import ImageSet

LONGEST_NAME = 100  # of a number in the results of a protocol
_NAME = re.compile(rf"\w{{1,{LONGEST_NAME}}}", re.ASCII)


@dataclass(frozen=True)
class Representations:
    """What a protocol of the user's code measures: an encoder's representations of labelled images.

    All tensors are copies on the encoder's device; the labels of the images are copies, too.

    Attributes:
        train_h: Representations of the training images, without augmentation.
        train_labels: Their labels.
        test_h: Representations of the held-out images, on which the protocol measures.
        test_labels: Their labels.
        encoder: A copy of the encoder in evaluation mode, which the protocol may train; no weight is frozen.
        train: The training images; ``train.images.gather(rows)`` reads some of them.
        test: The held-out images.
        to_input: Converts images, uint8 (N, C, H, W), to the encoder's input, on their device.

    Shape:
        - train_h: (N, H) float32
        - train_labels: (N,) int64
        - test_h: (M, H) float32
        - test_labels: (M,) int64
    """

    train_h: Tensor
    train_labels: Tensor
    test_h: Tensor
    test_labels: Tensor
    encoder: nn.Module
    train: ImageSet
    test: ImageSet
    to_input: Callable[[Tensor], Tensor]


def measure(name: str, subject: Representations, seed: int) -> dict[str, bool | float | int | str]:
    """Measure with a function of the user's code.

    Args:
        name: The function's name, ``module:attribute``.
        subject: What it measures.
        seed: Seed of the streams of torch, numpy and random that the function draws from.

    Returns:
        What the function returns, with tensors and arrays without dimensions as numbers, and each text in one line.

    Raises:
        UserError: There is no such function, it fails, or it does not return results as a dict of finite numbers,
            among which each accuracy is in [0, 1], and of texts.
    """
    call = import_function(name, "protocol")
    with process_kept(seed), torch.enable_grad():
        try:
            found = call(subject)
        except Exception as error:  # the user's code may raise any exception
            raise UserError(f"protocol {name!r} fails: {describe_error(error)}") from error
    if not isinstance(found, Mapping) or not found:
        raise UserError(
            f"protocol {name!r} returns {found!r:.60}; it must return a dict of results, "
            'such as {"accuracy": 0.5}'
        )
    return {_checked(key, name): _value(value, key, name) for key, value in found.items()}


def _checked(key: Any, name: str) -> str:
    if isinstance(key, str) and _NAME.fullmatch(key):
        return key
    raise UserError(f"protocol {name!r} names a result {key!r:.60}; use letters, digits and underscores")


def _value(value: Any, key: str, name: str) -> bool | float | int | str:
    if isinstance(value, Tensor | np.ndarray | np.generic):
        value = value.tolist()  # a number, if there are no dimensions
    if not isinstance(value, bool | int | float | str):
        raise UserError(
            f"protocol {name!r} returns {type_words(value)} as {key}; results are numbers and texts"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"protocol {name!r} returns {value} as {key}; leave out what cannot be measured")
    is_share = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1
    if key.endswith("accuracy") and not is_share:
        raise UserError(
            f"protocol {name!r} returns {value!r:.60} as {key}; an accuracy is a number in [0, 1]"
        )
    return one_line(value) if isinstance(value, str) else value
