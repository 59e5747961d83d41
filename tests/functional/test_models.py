import math

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.decomposition import PCA

from atoll.functional import consensus_distance, metropolis_weights, spectral_gap, trajectory_plane

from .oracles import rows


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999), k=st.integers(1, 6), d=st.integers(1, 5))
def test_consensus_distance_against_loop(seed, k, d):
    models = rows(k, d, seed)
    mean = [sum(models[i][j].item() for i in range(k)) / k for j in range(d)]
    squares = [sum((models[i][j].item() - mean[j]) ** 2 for j in range(d)) for i in range(k)]
    assert float(consensus_distance(models)) == pytest.approx(math.sqrt(sum(squares) / k), rel=1e-12)


def test_equal_models_agree():
    assert float(consensus_distance(torch.ones(3, 4))) == 0.0
    far = torch.tensor([[300.0, 0.0], [-300.0, 0.0]], dtype=torch.float16)  # whose squares overflow
    assert float(consensus_distance(far)) == 300.0


@pytest.mark.parametrize("clients", [3, 4, 7, 10])
def test_the_spectral_gap_of_a_cycle_is_the_closed_form(clients):
    weights = metropolis_weights(torch.from_numpy(nx.to_numpy_array(nx.cycle_graph(clients))).double())
    eigenvalues = sorted(abs(1 / 3 + 2 / 3 * math.cos(2 * math.pi * k / clients)) for k in range(clients))
    assert float(spectral_gap(weights)) == pytest.approx(1 - eigenvalues[-2], abs=1e-12)


@settings(max_examples=20, deadline=None)
@given(clients=st.integers(2, 8), seed=st.integers(0, 99))
def test_a_gossip_step_shrinks_the_distance_from_consensus_at_least_by_the_gap(clients, seed):
    graph = nx.gnp_random_graph(clients, 0.6, seed=seed)
    weights = metropolis_weights(torch.from_numpy(nx.to_numpy_array(graph)).double())
    gap, models = float(spectral_gap(weights)), rows(clients, 3, seed)
    assert (gap > 1e-9) == nx.is_connected(graph)
    bound = (1 - gap) * float(consensus_distance(models))
    assert float(consensus_distance(weights @ models)) <= bound + 1e-12
    # The bound is reached by the eigenvector of that eigenvalue.
    values, vectors = np.linalg.eigh(weights.numpy())
    values[-1] = 0 if clients > 1 else values[-1]
    worst = torch.from_numpy(vectors[:, [int(np.abs(values).argmax())]])
    if nx.is_connected(graph):
        reached = float(consensus_distance(weights @ worst)) / float(consensus_distance(worst))
        assert reached == pytest.approx(1 - gap, abs=1e-9)


def test_extreme_gaps():
    assert float(spectral_gap(torch.full((5, 5), 0.2))) == pytest.approx(1.0)
    assert float(spectral_gap(torch.eye(3))) == 0.0
    assert float(spectral_gap(torch.ones(1, 1))) == 1.0
    with pytest.raises(ValueError, match=r"symmetric weights \(K, K\), got weights \(2, 3\)"):
        spectral_gap(torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"got weights \(0, 0\)"):
        spectral_gap(torch.ones(0, 0))
    with pytest.raises(ValueError, match="symmetric"):
        spectral_gap(torch.tensor([[1.0, 0.0], [0.5, 0.5]]))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999), t=st.integers(3, 8), d=st.integers(2, 12))
def test_the_plane_is_sklearns_principal_plane_through_the_last_model(seed, t, d):
    models = rows(t, d, seed)
    directions, places = trajectory_plane(models)
    torch.testing.assert_close(directions @ directions.T, torch.eye(2).double(), atol=1e-9, rtol=0)
    steps = models - models[-1]
    torch.testing.assert_close(places, steps @ directions.T)
    assert places[-1].tolist() == [0.0, 0.0]
    # Mirrored rows have mean 0, so that scikit-learn, which centres, has the same components.
    oracle = PCA(2, svd_solver="full").fit(torch.cat([steps, -steps]).numpy())
    along = np.abs(oracle.components_ @ directions.numpy().T)
    gaps = np.linalg.svd(steps.numpy(), compute_uv=False)
    if gaps[0] > 1.01 * gaps[1] and (len(gaps) < 3 or gaps[1] > 1.01 * gaps[2]):
        np.testing.assert_allclose(along, np.eye(2), atol=1e-6)
    kept = float(places.square().sum())
    assert kept == pytest.approx(float((gaps[:2] ** 2).sum()), rel=1e-9)


def test_a_straight_trajectory_has_no_second_direction():
    start, way = torch.arange(4.0), torch.tensor([0.0, -3.0, 0.0, 4.0])
    directions, places = trajectory_plane(torch.stack([start + s * way for s in (2.0, 1.0, 0.0)]))
    torch.testing.assert_close(directions, torch.stack([way / 5, torch.zeros(4)]), atol=1e-6, rtol=0)
    torch.testing.assert_close(places, torch.tensor([[10.0, 0], [5.0, 0], [0, 0]]), atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="at least 2 models"):
        trajectory_plane(torch.ones(1, 4))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_trajectory_through_a_model_that_is_not_finite_has_no_plane(bad):
    with pytest.raises(ValueError, match=r"models must be finite, got models \(2, 3\)"):
        trajectory_plane(torch.tensor([[1.0, bad, 0.0], [1.0, 0.0, 0.0]]))
