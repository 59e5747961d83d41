"""Losses that make two outputs agree: two views, two networks, an image and its reconstruction."""

from __future__ import annotations

from torch import Tensor

from atoll.functional._tensors import check_rows, cosine, full_precision, shapes, unit


@full_precision
def alignment(z1: Tensor, z2: Tensor) -> Tensor:
    """Mean squared distance between the normalised embeddings of two views.

    L = (1/N) Σ_i ‖ẑ1_i − ẑ2_i‖², in [0, 4].

    Args:
        z1: Embeddings of the first view.
        z2: Embeddings of the second view.

    Shape:
        z1, z2: (N, d). Output: scalar.

    Raises:
        ValueError: If the shapes differ.

    Reference:
        Wang and Isola, Understanding Contrastive Representation Learning through Alignment and Uniformity on
        the Hypersphere, 2020, with exponent 2.

    Example:
        >>> import torch
        >>> from atoll.functional import alignment
        >>> z1, z2 = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[3.0, 0.0], [1.0, 0.0]])
        >>> round(alignment(z1, z2).item(), 4)  # squared distances 0 and 2
        1.0
    """
    check_rows(z1=z1, z2=z2)
    return (unit(z1) - unit(z2)).square().sum(dim=1).mean()


@full_precision
def byol(q: Tensor, z_target: Tensor) -> Tensor:
    """BYOL's loss in one direction: the prediction compared with the target's embedding of the other view.

    L = (1/N) Σ_i (2 − 2 cos(q_i, sg z_i)), in [0, 4]. The full loss adds the other direction.

    Args:
        q: Predictions of the online network.
        z_target: Embeddings of the target network; no gradient flows to them.

    Shape:
        q, z_target: (N, d). Output: scalar.

    Raises:
        ValueError: If the shapes differ.

    Reference:
        Grill et al., Bootstrap Your Own Latent, 2020, Eq. 2.

    Example:
        >>> import torch
        >>> from atoll.functional import byol
        >>> q, z = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[2.0, 0.0], [0.0, -1.0]])
        >>> round(byol(q, z).item(), 4)  # cosines 1 and −1
        2.0
    """
    check_rows(q=q, z_target=z_target)
    return 2.0 - 2.0 * cosine(q, z_target.detach()).mean()


@full_precision
def simsiam(q: Tensor, z: Tensor) -> Tensor:
    """SimSiam's loss in one direction: L = −(1/N) Σ_i cos(q_i, sg z_i), in [−1, 1].

    The full loss is the mean of both directions.

    Args:
        q: Predictions for one view.
        z: Projections of the other view; no gradient flows to them.

    Shape:
        q, z: (N, d). Output: scalar.

    Raises:
        ValueError: If the shapes differ.

    Reference:
        Chen and He, Exploring Simple Siamese Representation Learning, 2021, Eq. 1 and 3.

    Example:
        >>> import torch
        >>> from atoll.functional import simsiam
        >>> q, z = torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 0.0]])
        >>> round(simsiam(q, z).item(), 4)
        -0.6
    """
    check_rows(q=q, z=z)
    return -cosine(q, z.detach()).mean()


@full_precision
def masked_reconstruction(prediction: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """Mean squared error over the masked entries only, the loss of masked autoencoders.

    Predictions for visible entries do not affect the loss. If no entry is masked, the loss is 0.

    Args:
        prediction: The output of the decoder.
        target: The original values.
        mask: 1 (or True) for masked entries. It may have fewer dimensions than `prediction`: a mask (N, P) covers
            the whole patch of a prediction (N, P, v). Dimensions of size one are expanded.

    Shape:
        prediction, target: the same shape, any number of dimensions. mask: the leading dimensions. Output: scalar.

    Raises:
        ValueError: If the shapes do not match.

    Reference:
        He et al., Masked Autoencoders Are Scalable Vision Learners, 2022, Section 3.

    Example:
        >>> import torch
        >>> from atoll.functional import masked_reconstruction
        >>> prediction, target = torch.tensor([[1.0, 2.0, 3.0]]), torch.zeros(1, 3)
        >>> masked_reconstruction(prediction, target, mask=torch.tensor([[0, 1, 1]])).item()  # (4 + 9) / 2
        6.5
    """
    fits = prediction.shape == target.shape and prediction.is_floating_point() and prediction.numel() > 0
    fits = fits and mask.ndim <= prediction.ndim
    fits = fits and all(m in (1, n) for m, n in zip(mask.shape, prediction.shape, strict=False))
    if not fits:
        got = shapes(prediction=prediction, target=target, mask=mask)
        raise ValueError(
            f"expected a prediction of its target's shape and a mask of the leading dimensions, got {got}"
        )
    trailing = (1,) * (prediction.ndim - mask.ndim)
    masked = mask.reshape(mask.shape + trailing).to(prediction.dtype).expand_as(prediction)
    return ((prediction - target).square() * masked).sum() / masked.sum().clamp_min(1.0)
