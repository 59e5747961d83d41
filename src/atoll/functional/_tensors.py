"""Helpers that all equations share: precision, shape checks, safe normalisation."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

# Rows with a smaller norm have no direction; `torch.nn.functional.normalize` uses the same bound.
MIN_NORM = 1e-12


def full_precision(function: Callable[P, R]) -> Callable[P, R]:
    """Evaluate an equation in float32, or in float64 if its first floating tensor is float64.

    Half-precision tensors are promoted and autocast is disabled, because logarithms and exponentials of
    similarities divided by a small temperature lose all their precision in 8 or 11 bits. The other floating
    tensors are cast to the dtype of the first, so that a float64 constant does not slow a float32 loss down.
    """

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        floats = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.is_floating_point()]
        if not floats:
            return function(*args, **kwargs)
        dtype = torch.promote_types(floats[0].dtype, torch.float32)

        def cast(value: Any) -> Any:
            return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

        device = floats[0].device.type
        mixed = device != "meta" and torch.is_autocast_enabled(device)
        with torch.autocast(device, enabled=False) if mixed else contextlib.nullcontext():
            return function(*map(cast, args), **{name: cast(value) for name, value in kwargs.items()})

    return wrapper


def shapes(**tensors: Tensor) -> str:
    """Names, shapes and dtypes of tensors, formatted for error messages."""
    return ", ".join(
        f"{name} {tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for name, t in tensors.items()
    )


def check_rows(least: int = 1, **tensors: Tensor) -> None:
    """Check that all tensors are floating and have one shape (N, d), N >= `least`, d >= 1.

    Raises:
        ValueError: If they do not; the message names every shape.
    """
    first = next(iter(tensors.values()))
    good = first.ndim == 2 and first.shape[0] >= least and first.shape[1] >= 1
    if not good or any(t.shape != first.shape or not t.is_floating_point() for t in tensors.values()):
        same = "one shape (N, d)" if len(tensors) > 1 else "shape (N, d)"
        raise ValueError(f"expected float tensors of {same} with N >= {least}, got {shapes(**tensors)}")


def check_width(z: Tensor, least: int = 0, **tensors: Tensor) -> None:
    """Check that each tensor is floating and has shape (M, d), with M >= `least` and the width d of `z`, (N, d).

    Raises:
        ValueError: If one does not; the message names every shape.
    """
    for t in tensors.values():
        if t.ndim != 2 or t.shape[0] < least or t.shape[1] != z.shape[1] or not t.is_floating_point():
            got = shapes(**tensors)
            raise ValueError(f"expected float shape (M, {z.shape[1]}) with M >= {least}, got {got}")


def check_finite(**tensors: Tensor) -> None:
    """Check that each tensor is finite, for decompositions, which have no result for other values.

    Raises:
        ValueError: If one is not; the message names it.
    """
    for name, t in tensors.items():
        if not t.isfinite().all():
            raise ValueError(f"{name} must be finite, got {shapes(**{name: t})} with other values")


def check_positive(**numbers: float) -> None:
    """Check that each number is above zero.

    Raises:
        ValueError: If one is not; the message names it.
    """
    for name, number in numbers.items():
        if not number > 0:
            raise ValueError(f"{name} must be above 0, got {number}")


def unit(z: Tensor) -> Tensor:
    """Scale rows to length one; a row of zeros stays zero, and its gradient is zero.

    Dividing by a small constant instead would give a zero row a gradient of 1e12. What is not a number stays so.

    Shape:
        z: (..., d). Output: as z.
    """
    norm = torch.linalg.vector_norm(z, dim=-1, keepdim=True)
    return torch.where(norm <= MIN_NORM, torch.zeros_like(z), z / norm.clamp_min(MIN_NORM))


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Row-wise cosine similarity; 0 if either row is zero.

    Shape:
        a, b: (N, d). Output: (N,).
    """
    return (unit(a) * unit(b)).sum(dim=-1)


def squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """‖a_i − b_j‖² as ‖a_i‖² + ‖b_j‖² − 2⟨a_i, b_j⟩, without the (N, M, d) differences.

    The rounding error is that of the squared norms, so a small distance may come out negative. Callers therefore
    centre rows that may be long, all on one point, which changes no distance; rows of length one need no centring.

    Shape:
        a: (N, d). b: (M, d). Output: (N, M).
    """
    return a.square().sum(dim=1)[:, None] + b.square().sum(dim=1) - 2.0 * (a @ b.T)


def zero_loss(z: Tensor) -> Tensor:
    """Zero that keeps `z` in the graph, with gradient zero, for losses over an empty set."""
    return z.sum() * 0.0


def off_diagonal_squares(matrix: Tensor) -> Tensor:
    """Sum of the squared off-diagonal entries.

    The diagonal is set to zero; subtracting its squares from the total would leave a rounding error.
    """
    return (matrix * matrix).fill_diagonal_(0.0).sum()


def standardise(z: Tensor, unbiased: bool, eps: float = 0.0) -> Tensor:
    """Standardise each column to mean zero and variance one over the rows.

    A column that is constant up to rounding becomes zero, with gradient zero.

    Args:
        z: The rows.
        unbiased: Divide by N − 1 instead of N in the variance.
        eps: Number that is added to the variance.

    Shape:
        z: (N, d), N >= 2. Output: as z.
    """
    centred = z - z.mean(dim=0)
    variance = centred.square().sum(dim=0) / (len(z) - int(unbiased))
    rounding = 8.0 * torch.finfo(z.dtype).eps * z.detach().abs().amax(dim=0)
    constant = variance.detach() <= rounding.square()
    scale = (torch.where(constant, torch.ones_like(variance), variance) + eps).sqrt()
    return torch.where(constant, torch.zeros_like(z), centred / scale)
