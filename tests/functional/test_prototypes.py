import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.cluster import KMeans
from torch.autograd import gradcheck

from atoll.functional import (
    k_means,
    nt_xent,
    prototype_classification,
    prototype_contrast,
    prototype_divergence,
)

from . import oracles
from .oracles import rows


def labelled(n, clusters, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(clusters, (n,), generator=generator), torch.randint(
        clusters, (n,), generator=generator
    )


seeds = st.integers(0, 99)
sizes = {"n": st.integers(1, 7), "d": st.integers(1, 4), "clusters": st.integers(1, 5), "seed": seeds}


def blobs(seed, per=20):
    centres = torch.tensor([[0.0, 0.0], [9.0, 0.0], [0.0, 9.0]]).double()
    return (centres[:, None] + rows(3 * per, 2, seed).reshape(3, per, 2)).reshape(-1, 2)


@pytest.mark.parametrize("seed", range(20))
def test_k_means_finds_blobs(seed):
    """k-means++ seeds of far blobs are almost always one in each; the few draws that are not are left out here."""
    x = blobs(seed) * torch.tensor([5.0, 5.0])
    labels = k_means(x, torch.rand(3, generator=torch.Generator().manual_seed(seed)))
    groups = [set(labels[i : i + 20].tolist()) for i in (0, 20, 40)]
    assert all(len(group) == 1 for group in groups)
    assert len(set.union(*groups)) == 3


def test_k_means_is_scikit_learns_from_the_same_seeds():
    x = rows(60, 3)
    draws = torch.tensor([0.0, 0.3, 0.6, 0.9]).double()
    seeds = [x[0]]  # the draws, by hand: the first row in whose share of the squared distances the draw falls
    for draw in draws[1:].tolist():
        nearest = [min(oracles.squared(row.tolist(), seed.tolist()) for seed in seeds) for row in x]
        left, chosen = draw * sum(nearest), 0
        while left >= nearest[chosen]:
            left, chosen = left - nearest[chosen], chosen + 1
        seeds.append(x[chosen])
    for iterations in (1, 3, 100):
        theirs = KMeans(4, init=torch.stack(seeds).numpy(), n_init=1, max_iter=iterations, tol=0.0).fit(
            x.numpy()
        )
        assert k_means(x, draws, iterations).tolist() == theirs.predict(x.numpy()).tolist()


def test_k_means_never_takes_a_seed_twice_while_there_are_others():
    assert k_means(torch.tensor([[0.0], [0.1], [9.0]]), torch.zeros(2)).tolist() == [0, 0, 1]


def test_a_cluster_that_loses_all_rows_keeps_its_centroid():
    x = [[0, 4], [7, 3], [0, 3], [5, 3], [0, 5], [3, 6], [2, 3], [1, 2]]
    seeds = [0, 2, 7, 4, 5, 6]
    nearest, draws = [1.0] * 8, []
    for seed in seeds:  # a draw in the middle of its share
        draws.append((sum(nearest[:seed]) + nearest[seed] / 2) / sum(nearest))
        distances = [oracles.squared(row, x[seed]) for row in x]
        nearest = (
            distances if len(draws) == 1 else [min(pair) for pair in zip(nearest, distances, strict=True)]
        )
    centroids = [x[seed] for seed in seeds]
    for _ in range(5):
        labels = [min(range(6), key=lambda j, row=row: oracles.squared(row, centroids[j])) for row in x]
        for j in set(labels):
            members = [row for row, label in zip(x, labels, strict=True) if label == j]
            centroids[j] = [sum(column) / len(members) for column in zip(*members, strict=True)]
    assert len(set(labels)) == 5
    assert k_means(torch.tensor(x).double(), torch.tensor(draws).double()).tolist() == labels


def test_k_means_of_rows_far_from_zero():
    x, draws = rows(40, 3), torch.rand(4, generator=torch.Generator().manual_seed(0))
    assert k_means((x + 4096).float(), draws).tolist() == k_means(x, draws.double()).tolist()


def test_k_means_of_fewer_rows_than_clusters_and_of_equal_rows():
    labels = k_means(torch.tensor([[1.0], [5.0]]), torch.rand(10))
    assert len(set(labels.tolist())) == 2
    assert len(set(k_means(torch.ones(6, 2), torch.rand(3)).tolist())) == 1


@settings(max_examples=25, deadline=None)
@given(**sizes, temperature=st.sampled_from([0.2, 1.0]))
def test_against_loop(n, d, clusters, seed, temperature):
    x1, x2, (a, b) = rows(n, d, seed), rows(n, d, seed + 1), labelled(n, clusters, seed)
    lists = (x1, x2, a.tolist(), b.tolist(), clusters)
    contrast = prototype_contrast(x1, x2, a, b, clusters, temperature)
    assert float(contrast) == pytest.approx(
        oracles.prototype_contrast(*lists, temperature), rel=1e-9, abs=1e-9
    )
    classified = prototype_classification(x1, x2, a, b, clusters)
    assert float(classified) == pytest.approx(oracles.prototype_classification(*lists), rel=1e-9, abs=1e-9)
    for normalise in (True, False):
        expected = oracles.prototype_divergence(x1, a.tolist(), normalise)
        found = prototype_divergence(x1, a, clusters, normalise)
        assert float(found) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_with_a_cluster_for_each_image_the_contrast_is_nt_xent():
    z1, z2, labels = rows(4, 3), rows(4, 3, 1), torch.arange(4)
    for clusters in (4, 9):  # empty clusters do not count
        found = prototype_contrast(z1, z2, labels, labels, clusters, 0.3)
        torch.testing.assert_close(found, nt_xent(z1, z2, 0.3))


def test_known_values():
    eye, labels = torch.eye(2).double(), torch.arange(2)
    assert float(prototype_classification(eye, eye, labels, labels, 2)) == pytest.approx(
        math.log(1 + math.exp(-2))
    )
    opposite = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 5.0], [0.0, 5.0]]).double()
    halves = torch.tensor([0, 0, 1, 1])  # a prototype of zero, at distance 1; and one direction, at 0 or 4
    assert float(prototype_divergence(opposite, halves, 4)) == pytest.approx(1 / 2)
    assert float(prototype_divergence(opposite, halves, 4, normalise=False)) == pytest.approx((1 + 4) / 2)


def test_gradients():
    a, b = torch.tensor([0, 1, 2, 0]), torch.tensor([1, 1, 3, 0])  # 2 and 3 are in one view only
    x, y = rows(4, 3).requires_grad_(), rows(4, 3, 1).requires_grad_()
    assert gradcheck(lambda x, y: prototype_contrast(x, y, a, b, 5), (x, y))
    assert gradcheck(lambda x, y: prototype_classification(x, y, a, b, 5), (x, y))


def test_without_a_common_cluster_loss_and_gradient_are_zero():
    x = rows(3, 2).requires_grad_()
    a, b = torch.tensor([0, 0, 0]), torch.tensor([1, 1, 1])
    for loss in (prototype_contrast(x, x, a, b, 3), prototype_classification(x, x, a, b, 3)):
        assert loss.item() == 0
        (gradient,) = torch.autograd.grad(loss, x)
        assert not gradient.any()


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match=r"one draw for each cluster, shape \(K,\), got draws \(0,\)"):
        k_means(torch.ones(2, 2), torch.ones(0))
    with pytest.raises(ValueError, match=r"of one shape \(N, d\)"):
        prototype_contrast(
            torch.ones(2, 2), torch.ones(3, 2), torch.zeros(2).long(), torch.zeros(3).long(), 1
        )
    one, two, none = torch.ones(1, 2), torch.ones(2, 2), torch.zeros(2).long()
    for call in (
        lambda: prototype_classification(two, one, none, none, 1),  # PyTorch would repeat the row
        lambda: prototype_contrast(two, one, none, none, 1),
        lambda: prototype_divergence(two[0], none, 1),
        lambda: prototype_divergence(two.long(), none, 1),
    ):
        with pytest.raises(ValueError, match=r"expected float tensors of (one )?shape \(N, d\)"):
            call()
    for call in (
        lambda: prototype_contrast(two, two, none, none, 0),
        lambda: prototype_classification(two, two, none, none, 0),
        lambda: prototype_divergence(two, none, 0),
    ):
        with pytest.raises(ValueError, match="clusters must be above 0, got 0"):
            call()
    with pytest.raises(ValueError, match="temperature must be above 0"):
        prototype_contrast(two, two, none, none, 1, 0.0)


@pytest.mark.parametrize("wrong", [torch.tensor([0]), torch.zeros(4), torch.zeros(4, 1, dtype=torch.int64)])
def test_labels_that_do_not_fit_the_rows_are_refused(wrong) -> None:
    h, right = torch.eye(4), torch.tensor([0, 1, 1, 0])
    for call in (
        lambda: prototype_contrast(h, h, right, wrong, 2, 0.5),
        lambda: prototype_classification(h, h, right, wrong, 2),
        lambda: prototype_divergence(h, wrong, 2),
    ):
        with pytest.raises(ValueError, match=r"expected a cluster for each row, got rows \(4, 4\)"):
            call()


@pytest.mark.parametrize("outside", [-1, 2])
def test_labels_that_are_no_cluster_are_refused(outside) -> None:
    """Rows of such labels did not count, without a word, or ended in an error of an index."""
    h, right, wrong = torch.eye(4), torch.tensor([0, 1, 1, 0]), torch.tensor([0, 1, outside, 0])
    for call in (
        lambda: prototype_contrast(h, h, wrong, right, 2, 0.5),
        lambda: prototype_contrast(h, h, right, wrong, 2, 0.5),
        lambda: prototype_classification(h, h, wrong, right, 2),
        lambda: prototype_classification(h, h, right, wrong, 2),
        lambda: prototype_divergence(h, wrong, 2),
    ):
        with pytest.raises(ValueError, match=f"labels[12]? must be clusters from 0 to 1, got .*{outside}"):
            call()
