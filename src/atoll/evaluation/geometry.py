"""Geometry of representations, which needs no labels: alignment, uniformity, rank."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll import functional


def geometry(
    h: Tensor,
    *,
    views: tuple[Tensor, Tensor] | None = None,
    clients: tuple[Tensor, Tensor] | None = None,
    t: float = 2.0,
) -> dict[str, float | list[float]]:
    """Compute alignment, uniformity and effective rank of a set of representations.

    Uniformity is the logarithm of the mean over pairs, as in `atoll.functional`: lower is more uniform, and
    the papers' tables print its negative. Alignment and uniformity use L2-normalised rows; the effective rank and
    the singular values use the rows without normalising or centring them.

    Args:
        h: Representations of one set of images, usually the test images.
        views: Representations of two views of the same images, in the same order; alignment needs them.
        clients: Representations of images that clients hold, and the client of each. The decomposition needs at
            least two clients, one of which holds two of the images.
        t: Inverse width of the Gaussian kernel of uniformity.

    Shape:
        - h: (N, d), N at least 2
        - views: (M, d) twice
        - clients: (L, d) and (L,) int

    Returns:
        ``uniformity``, ``effective_rank`` and ``singular_values`` (largest first); with views ``alignment``;
        with clients ``clients_uniformity`` and its parts ``_intra`` and ``_inter``, the logarithms of the
        mean over pairs within one client and between two clients.

    Raises:
        ValueError: The shapes do not match, or the representations are not finite.

    Reference:
        Wang and Isola, ICML 2020, https://arxiv.org/abs/2005.10242 (alignment, uniformity); SSD, Eq. 5, with
        the mixture weights that it omits (decomposition); Roy and Vetterli, 2007 (effective rank).

    Example:
        >>> import torch
        >>> from atoll.evaluation import geometry
        >>> found = geometry(torch.eye(3))
        >>> round(found["effective_rank"], 4), round(found["uniformity"], 4)
        (3.0, -4.0)
    """
    if h.ndim != 2 or not h.isfinite().all():
        other = "" if h.ndim != 2 else " with other values"
        raise ValueError(f"representations must be finite and (N, d), got {tuple(h.shape)}{other}")
    # R of a QR decomposition has the singular values of h, and at most d × d entries.
    small = torch.linalg.qr(h.double(), mode="r").R
    found: dict[str, float | list[float]] = {
        "uniformity": float(functional.uniformity(h, t)),
        "effective_rank": float(functional.effective_rank(small)),
        "singular_values": torch.linalg.svdvals(small).tolist(),
    }
    if views is not None:
        found["alignment"] = float(functional.alignment(*views))
    if clients is not None:
        client_h, ids = clients
        held = ids.bincount(minlength=1)
        if int((held > 0).sum()) > 1 and int(held.max()) > 1:
            parts = functional.uniformity_decomposition(client_h, ids, t)
            for name, part in zip(("", "_intra", "_inter"), parts, strict=True):
                found[f"clients_uniformity{name}"] = float(part)
    return found
