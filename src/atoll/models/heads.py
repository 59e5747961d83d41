"""Projectors and predictors: multilayer perceptrons, all built by `mlp`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from atoll.models.options import ModelOptions


def mlp(
    widths: Sequence[int], *, norm: bool = True, final_norm: str = "none", bias: bool = True
) -> nn.Sequential:
    """Build a multilayer perceptron: linear layers with ReLU between them.

    Args:
        widths: Widths from input to output; two widths give a single linear layer.
        norm: Whether to apply BatchNorm before every ReLU.
        final_norm: BatchNorm after the last layer: ``"none"``, ``"affine"`` or ``"plain"`` (no scale, no shift).
        bias: Whether linear layers have a bias.

    Shape:
        - Input: (N, widths[0])
        - Output: (N, widths[-1])

    Example:
        >>> from atoll.models import mlp
        >>> [layer.__class__.__name__ for layer in mlp([128, 64, 32])]
        ['Linear', 'BatchNorm1d', 'ReLU', 'Linear']
    """
    *hidden, last = pairwise(widths)
    layers: list[nn.Module] = []
    for before, after in hidden:
        layers.append(nn.Linear(before, after, bias=bias))
        if norm:
            layers.append(nn.BatchNorm1d(after))
        layers.append(nn.ReLU(inplace=True))
    layers.append(nn.Linear(*last, bias=bias))
    if final_norm != "none":
        layers.append(nn.BatchNorm1d(last[1], affine=final_norm == "affine"))
    return nn.Sequential(*layers)


def embedding_dim(options: ModelOptions, in_dim: int) -> int:
    """Width of an embedding z for representations h of width ``in_dim``.

    Example:
        >>> from atoll.models import ModelOptions, embedding_dim
        >>> embedding_dim(ModelOptions(projector_dim=64), in_dim=128)
        64
    """
    if options.projector == "none":
        return in_dim
    return options.projector_dim or in_dim


def build_projector(options: ModelOptions, in_dim: int) -> nn.Module:
    """Build the projector g: h → z that the options describe; the identity if ``options.projector`` is ``"none"``.

    Args:
        options: The recipe's ``[model]`` section.
        in_dim: Width of a representation.

    Shape:
        - Input: (N, in_dim)
        - Output: (N, embedding_dim(options, in_dim))

    Example:
        >>> import torch
        >>> from atoll.models import ModelOptions, build_projector
        >>> build_projector(ModelOptions(projector_dim=64), in_dim=128)(torch.zeros(4, 128)).shape
        torch.Size([4, 64])
    """
    if options.projector == "none":
        return nn.Identity()
    return mlp(
        [in_dim, *options.projector_hidden, embedding_dim(options, in_dim)],
        norm=options.projector_norm,
        final_norm=options.projector_final_norm,
        bias=options.projector_bias,
    )


def build_predictor(options: ModelOptions, dim: int) -> nn.Module:
    """Build the predictor q of BYOL, SimSiam and FedX, from embeddings to embeddings.

    Args:
        options: The recipe's ``[model]`` section.
        dim: Width of an embedding.

    Shape:
        - Input: (N, dim)
        - Output: (N, dim)

    Example:
        >>> import torch
        >>> from atoll.models import ModelOptions, build_predictor
        >>> build_predictor(ModelOptions(), dim=64)(torch.zeros(4, 64)).shape
        torch.Size([4, 64])
    """
    return mlp([dim, *options.predictor_hidden, dim], norm=options.predictor_norm)
