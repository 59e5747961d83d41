"""Projectors and predictors: all of them are multilayer perceptrons, and `mlp` builds every one."""

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
    """Linear layers with ReLU between them.

    Args:
        widths: From the input's width to the output's; two of them make a single linear layer.
        norm: Whether BatchNorm stands before every ReLU.
        final_norm: BatchNorm at the end: ``"none"``, ``"affine"`` or ``"plain"`` (no scale, no shift).
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
    """Width of an embedding z when representations h are ``in_dim`` wide.

    Example:
        >>> from atoll.models import ModelOptions, embedding_dim
        >>> embedding_dim(ModelOptions(projector_dim=64), in_dim=128)
        64
    """
    if options.projector == "none":
        return in_dim
    return options.projector_dim or in_dim


def build_projector(options: ModelOptions, in_dim: int) -> nn.Module:
    """The projector g: h → z that the options describe; the identity where they say ``"none"``.

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
    """The predictor q of BYOL, SimSiam and FedX, from embeddings to embeddings.

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
