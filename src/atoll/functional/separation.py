"""The two terms of Soft Separation and Distillation (SSD)."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from atoll.functional._tensors import check_positive, check_rows, full_precision, shapes, unit


@full_precision
def dimension_scaling(
    z: Tensor,
    scales: Tensor,
    basis: Tensor | None = None,
    reduction: Literal["fro_over_n", "mean_sq"] = "fro_over_n",
    renormalise: bool = True,
) -> Tensor:
    """Dimension-scaled regularisation: pull embeddings towards the dimensions assigned to this client.

    With P = Q diag(scales) Qᵀ, the target of each normalised row is t = sg(Pẑ/‖Pẑ‖). The released code reduces by
    ‖Ẑ − T‖_F / N, which produced the published numbers; Eq. 7 reduces by (1/N)‖Ẑ − T‖_F², about 20 times stronger
    for a usual batch. Equal scales give exactly zero with zero gradient; otherwise, under the Frobenius norm,
    rounding errors alone would cause a gradient of full strength. Scales of 0 and 1 are a projection: hard
    separation.

    Args:
        z: Projector embeddings of one view.
        scales: α in this client's dimensions and 1 elsewhere.
        basis: Q, orthonormal, whose columns are the dimensions; the coordinate axes if None.
        reduction: "fro_over_n" or "mean_sq".
        renormalise: False, with "mean_sq", implements Eq. 7 literally, with t = sg(Pz) and z not normalised. That
            loss has no fixed point: its gradient makes the client's dimensions grow without bound.

    Shape:
        z: (N, d). scales: (d,). basis: (d, d). Output: scalar.

    Raises:
        ValueError: If the shapes do not match or the reduction is unknown.

    Reference:
        Fang et al., Soft Separation and Distillation, 2025, Eq. 6 and 7 (released code).

    Example:
        >>> import torch
        >>> from atoll.functional import dimension_scaling
        >>> z, scales = torch.tensor([[1.0, 1.0]]), torch.tensor([1.0, 0.0])
        >>> round(dimension_scaling(z, scales, reduction="mean_sq").item(), 4)  # 2 − √2
        0.5858
    """
    check_rows(z=z)
    d = z.shape[1]
    if scales.shape != (d,) or (basis is not None and basis.shape != (d, d)):
        given = {"z": z, "scales": scales} | ({} if basis is None else {"basis": basis})
        raise ValueError(f"expected scales ({d},) and a basis ({d}, {d}), got {shapes(**given)}")
    if reduction not in ("fro_over_n", "mean_sq"):
        raise ValueError(f"reduction must be 'fro_over_n' or 'mean_sq', got {reduction!r}")
    scales = scales.to(z.dtype)
    unchanged = scales[0] if renormalise else torch.ones_like(scales[0])
    u = unit(z) if renormalise else z
    fixed = u.detach()
    target = fixed * scales if basis is None else (fixed @ basis * scales) @ basis.T
    target = unit(target) if renormalise else target
    # Decided on the device, where z is: to ask for it here would wait for a GPU in every step.
    equal = (unchanged > 0) & (scales == unchanged).all()
    difference = u - torch.where(equal, fixed, target)
    if reduction == "mean_sq":
        return difference.square().sum() / len(z)
    frobenius: Tensor = torch.linalg.vector_norm(difference)
    return frobenius / len(z)


@full_precision
def projector_distillation(
    h: Tensor,
    z: Tensor,
    kind: Literal["kl", "mse"] = "kl",
    direction: Literal["zh", "hz"] = "zh",
    temperature: float = 0.5,
) -> Tensor:
    """Projector distillation: transfer what the projector has learned into the representation.

    "kl" with "zh" is KL(σ(z/τ)‖σ(h/τ)), as in the released code; "hz" is KL(σ(h/τ)‖σ(z/τ)), as in the paper. Both
    average over the rows, do not normalise, and pass gradient to both arguments. Both are 0 iff h − z is constant
    in each row. "mse" is the mean of (h − z)² over all entries; it has neither direction nor temperature.

    Args:
        h: Representations of the encoder.
        z: Embeddings of the projector.
        kind: "kl" or "mse".
        direction: "zh" or "hz".
        temperature: τ.

    Shape:
        h, z: (N, d). Output: scalar.

    Raises:
        ValueError: If the shapes differ, a name is unknown, or the temperature is not positive.

    Reference:
        Fang et al., Soft Separation and Distillation, 2025, Eq. 9 (released code).

    Example:
        >>> import torch
        >>> from atoll.functional import projector_distillation
        >>> h, z = torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 0.0]])
        >>> round(projector_distillation(h, z, temperature=1.0).item(), 4)  # log 2 − the entropy of σ(z)
        0.1109
    """
    check_rows(h=h, z=z)
    check_positive(temperature=temperature)
    if kind not in ("kl", "mse") or direction not in ("zh", "hz"):
        raise ValueError(
            f"kind must be 'kl' or 'mse' and direction 'zh' or 'hz', got {kind!r} and {direction!r}"
        )
    if kind == "mse":
        return F.mse_loss(h, z)
    log_h, log_z = (h / temperature).log_softmax(dim=1), (z / temperature).log_softmax(dim=1)
    log_p, log_q = (log_z, log_h) if direction == "zh" else (log_h, log_z)
    return F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)
