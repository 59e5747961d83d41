"""Feature clusters against scikit-learn's parts and clusters that are known."""

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.metrics import adjusted_rand_score
from threadpoolctl import threadpool_limits

from atoll.core.errors import UserError
from atoll.core.rng import derive_seed
from atoll.data.partition.feature_clusters import feature_clusters

DIGITS = torch.from_numpy(load_digits().data[:400]).float()


def blobs(scales=(1.0, 1.0)):
    generator = torch.Generator().manual_seed(0)
    truth = torch.arange(3).repeat(40)
    centres = torch.tensor([[0.0, 0.0], [8.0, 0.0], [0.0, 8.0]])
    return (centres[truth] + torch.randn(120, 2, generator=generator)) * torch.tensor(scales), truth


def test_clusters_are_those_of_pca_whitened_and_kmeans():
    state = derive_seed(3, "feature clusters") % 2**32
    white = PCA(30, whiten=True, random_state=state).fit_transform(DIGITS.double().numpy())
    expected = KMeans(10, n_init=10, random_state=state).fit_predict(white)
    found = feature_clusters(DIGITS, 10, 30, seed=3)
    assert adjusted_rand_score(expected, found) > 0.99  # equal, but for the order of sums


def test_known_groups_are_found_whatever_the_scale_of_a_feature():
    for scales in ((1.0, 1.0), (1.0, 1e4)):  # whitening removes the scale
        features, truth = blobs(scales)
        assert adjusted_rand_score(truth, feature_clusters(features, 3, 2, seed=0)) == 1


def test_the_seed_alone_decides():
    first = feature_clusters(DIGITS, 5, 10, seed=0)
    with threadpool_limits(2):
        again = feature_clusters(DIGITS, 5, 10, seed=0)
    assert torch.equal(first, again)
    assert not torch.equal(first, feature_clusters(DIGITS, 5, 10, seed=1))
    assert set(first.tolist()) == set(range(5))


def test_a_constant_feature_is_not_blown_up():
    features, truth = blobs()
    noise = torch.from_numpy(np.random.default_rng(0).normal(size=(120, 1))).float() * 1e-6
    assert adjusted_rand_score(truth, feature_clusters(torch.cat([features, noise], 1), 3, 30, seed=0)) == 1


def test_mistakes_are_named():
    with pytest.raises(UserError, match="500 feature clusters need"):
        feature_clusters(DIGITS, 500, 30, seed=0)
    with pytest.raises(UserError, match="not finite"):
        feature_clusters(DIGITS / 0, 5, 30, seed=0)
