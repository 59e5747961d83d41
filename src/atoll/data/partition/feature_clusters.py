"""Clusters of images by their features, which a partition can split instead of labels (Dec-SSL, Figs. 2 and 18)."""

from __future__ import annotations

import numpy as np
import torch
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]
from torch import Tensor

from atoll.core.errors import UserError
from atoll.core.rng import derive_seed

SMALLEST = 1e-10  # share of the largest variance below which a component is rounding error


def feature_clusters(features: Tensor, clusters: int, dims: int, seed: int) -> Tensor:
    """Cluster images by their features: PCA, whitening, k-means (scikit-learn's, the best of ten starts).

    The result is the same for every number of threads.

    Args:
        features: Features of each image.
        clusters: Number of clusters.
        dims: Maximum number of principal components.
        seed: The run's seed.

    Shape:
        - features: (N, d); output: (N,) int64, values 0 … clusters − 1

    Raises:
        UserError: There are fewer images than clusters, or a feature is not finite.

    Reference:
        Wang et al., "Does Learning from Decentralized Non-IID Unlabeled Data Benefit from Self Supervision?", ICLR
        2023, Appendix C.2; its code reduces 2,048 dimensions to 30, whitened.

    Example:
        >>> import torch
        >>> from atoll.data.partition.feature_clusters import feature_clusters
        >>> far_apart = torch.tensor([[0.0, 0.0], [0.1, 0.0], [9.0, 9.0], [9.0, 9.1]])
        >>> ids = feature_clusters(far_apart, clusters=2, dims=1, seed=0)
        >>> bool(ids[0] == ids[1] != ids[2] == ids[3])
        True
    """
    from sklearn.cluster import KMeans  # the import takes a second, and most runs do not need it
    from sklearn.decomposition import PCA

    if len(features) < clusters:
        raise UserError(
            f"{clusters} feature clusters need as many training images, and there are {len(features)}; "
            "lower partition.feature_clusters"
        )
    if not features.isfinite().all():
        raise UserError("the features that partition.features names are not finite; choose another encoder")
    rows = features.double().cpu().numpy()
    random_state = derive_seed(seed, "feature clusters") % 2**32
    with threadpool_limits(1):  # sums in another order could move an image to another cluster
        pca = PCA(min(dims, *rows.shape), whiten=True, random_state=random_state)
        white = pca.fit_transform(rows)
        white = white[:, pca.explained_variance_ > SMALLEST * pca.explained_variance_[0]]
        if white.shape[1] == 0:
            white = np.zeros((len(rows), 1))
        ids = KMeans(clusters, n_init=10, random_state=random_state).fit_predict(white)
    return torch.from_numpy(ids.astype(np.int64))
