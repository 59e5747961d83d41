import warnings

import numpy as np
import pytest
import torch

from atoll.evaluation.embedding_map import embedding_map, map_rows

from .sets import blobs


def test_neighbours_stay_neighbours_and_the_seed_decides_all() -> None:
    h, y, _, _ = blobs(150, 20, 3, spread=0.3)
    points = embedding_map(h, seed=0)
    assert points.shape == (150, 2)
    assert points.dtype == np.float32
    distance = np.linalg.norm(points[:, None] - points[None], axis=2) + np.diag([np.inf] * 150)
    assert (y.numpy()[distance.argmin(1)] == y.numpy()).mean() > 0.98
    np.testing.assert_array_equal(points, embedding_map(h * 4, seed=0))  # lengths do not matter


def test_a_big_set_is_shown_by_a_part_that_is_known() -> None:
    rows = map_rows(300, seed=1, max_points=80)
    assert len(rows.unique()) == 80
    assert torch.equal(rows, map_rows(300, seed=1, max_points=80))
    assert not torch.equal(rows, map_rows(300, seed=2, max_points=80))


@pytest.mark.parametrize("n", [0, 1, 3, 4, 6])
def test_small_sets_have_a_map_too(n: int) -> None:
    points = embedding_map(torch.randn(n, 5, generator=torch.Generator().manual_seed(0)), seed=0)
    assert points.shape == (n, 2)
    assert np.isfinite(points).all()


def test_collapsed_and_one_dimensional_sets_have_a_map_too() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # scikit-learn divides by the variance, which is 0
        for h in (torch.ones(20, 5), torch.zeros(20, 5)):
            assert not embedding_map(h, seed=0).any()
    line = embedding_map(torch.linspace(-1, 1, 20)[:, None] + 0.01, seed=0)
    assert np.isfinite(line).all()


def test_what_is_no_matrix_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(4, 3, 2\)"):
        embedding_map(torch.zeros(4, 3, 2), seed=0)
