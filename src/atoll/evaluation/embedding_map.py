"""Two-dimensional map of representations: every image is a point, and neighbours are close to each other."""

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


def map_rows(n: int, seed: int, max_points: int) -> Tensor:
    """Row indices of the images to show on a map: all, or a random subset.

    Args:
        n: Number of images.
        seed: The run's seed.
        max_points: Maximum number of rows.

    Shape:
        - Output: (min(n, max_points),) int64, ascending
    """
    return sample(n, max_points, seed, "map")


def embedding_map(h: Tensor, seed: int) -> NDArray[np.float32]:
    """Project representations to two dimensions: PCA of normalised rows, then t-SNE.

    The same representations and seed give the same map for any number of threads, because t-SNE runs in a single
    thread. For a thousand points, this takes one to three seconds, about as long as with several threads. As in all
    t-SNE maps, distances between far points mean little.

    Args:
        h: Representations; `map_rows` selects a subset if there are many.
        seed: The run's seed.

    Shape:
        - h: (N, d)
        - Output: (N, 2)

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
        raise ValueError(f"a map needs representations (N, d); got {tuple(h.shape)}")
    rows = F.normalize(h.double(), dim=1).cpu().numpy()
    n = len(rows)
    if n < 4:  # too few for neighbourhoods
        return np.zeros((n, 2), np.float32) + np.arange(n, dtype=np.float32)[:, None]
    from sklearn.decomposition import PCA  # the import takes a second, and clients do not need it
    from sklearn.manifold import TSNE

    if np.allclose(rows - rows.mean(0), 0):  # a collapsed representation: all images at one point
        return np.zeros((n, 2), np.float32)
    with threadpool_limits(1):
        flat = PCA(min(COMPONENTS, *rows.shape), svd_solver="full").fit_transform(rows)
        if flat.shape[1] == 1:  # the initialisation of t-SNE needs two components
            flat = np.pad(flat, ((0, 0), (0, 1)))
        tsne = TSNE(
            init="pca", perplexity=min(PERPLEXITY, (n - 1) / 3), random_state=derive_seed(seed, "map") % 2**32
        )
        points: NDArray[np.float32] = tsne.fit_transform(flat).astype(np.float32)
    return points
