"""A picture of a representation: every image a point in the plane, near where its neighbours are."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]
from torch import Tensor
from torch.nn import functional as F

from atoll.core.rng import derive_seed
from atoll.evaluation.embed import sample

COMPONENTS = 50  # before t-SNE, which is slow in many dimensions
PERPLEXITY = 30.0


def map_rows(n: int, seed: int, max_points: int = 1000) -> Tensor:
    """Which of n representations `embedding_map` shows, ascending: all, or ``max_points`` drawn by the seed.

    Shape:
        - Output: (min(n, max_points),) int64
    """
    return sample(n, max_points, seed, "map")


def embedding_map(h: Tensor, seed: int, max_points: int = 1000) -> NDArray[np.float32]:
    """Points in the plane for the representations that `map_rows` names: PCA of normalised rows, then t-SNE.

    The same representations and seed give the same picture, whatever the number of threads: it is made by
    one, which is about as fast for so few points. Distances between far points mean little, as in every such
    map.

    Args:
        h: representations.
        seed: of the run.
        max_points: most points shown; a second or three for each thousand.

    Shape:
        - h: (N, d)
        - Output: (min(N, max_points), 2)

    Raises:
        ValueError: ``h`` is not (N, d).

    Reference:
        van der Maaten and Hinton, "Visualizing Data using t-SNE", JMLR 2008.

    Example:
        >>> import torch
        >>> from atoll.evaluation import embedding_map
        >>> embedding_map(torch.randn(20, 8, generator=torch.Generator().manual_seed(0)), seed=0).shape
        (20, 2)
    """
    if h.ndim != 2:
        raise ValueError(f"a map is made of representations (N, d); got {tuple(h.shape)}")
    rows = F.normalize(h[map_rows(len(h), seed, max_points).to(h.device)].double(), dim=1).cpu().numpy()
    n = len(rows)
    if n < 4:  # too few for neighbourhoods
        return np.zeros((n, 2), np.float32) + np.arange(n, dtype=np.float32)[:, None]
    from sklearn.decomposition import PCA  # a second to import, and a client needs no map
    from sklearn.manifold import TSNE

    with threadpool_limits(1):
        flat = PCA(min(COMPONENTS, *rows.shape), svd_solver="full").fit_transform(rows)
        if np.allclose(flat, 0):  # a collapsed representation: all images in one place
            return np.zeros((n, 2), np.float32)
        if flat.shape[1] == 1:  # t-SNE begins with two components
            flat = np.pad(flat, ((0, 0), (0, 1)))
        tsne = TSNE(
            init="pca", perplexity=min(PERPLEXITY, (n - 1) / 3), random_state=derive_seed(seed, "map") % 2**32
        )
        points: NDArray[np.float32] = tsne.fit_transform(flat).astype(np.float32)
    return points
