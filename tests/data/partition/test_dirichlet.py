"""The four Dirichlet splits, each against a slow loop that follows its description word by word."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.data.partition.dirichlet import VARIANTS, dirichlet_counts, sinkhorn_balance, split_dirichlet

SIZES = np.array([50, 70, 30, 90])
K = 5


def proportions(alpha, seed=0):
    return np.random.default_rng(seed).dirichlet(np.full(K, alpha), size=len(SIZES))


def counts_of(name, p, sizes=SIZES):
    return VARIANTS[name].counts(p, np.asarray(sizes), np.random.default_rng(0))


@pytest.mark.parametrize("name", ["moon", "dec-ssl"])
@pytest.mark.parametrize("alpha", [0.1, 1.0, 10.0])
def test_masked_counts_follow_moon(name, alpha):
    p = proportions(alpha)
    held = [[] for _ in range(K)]
    for c, size in enumerate(SIZES):
        samples = [(c, i) for i in range(size)]
        q = np.array([0.0 if len(held[k]) >= SIZES.sum() / K else p[c, k] for k in range(K)])
        q = q / q.sum()
        cuts = [int(np.floor(sum(q[: k + 1]) * size)) for k in range(K - 1)]
        for k, (start, end) in enumerate(zip([0, *cuts], [*cuts, size], strict=True)):
            held[k] += samples[start:end]
    expected = [[sum(1 for c, _ in samples if c == wanted) for wanted in range(4)] for samples in held]
    assert counts_of(name, p).tolist() == expected


def test_a_client_with_exactly_its_share_receives_no_more():
    p = np.full((3, 5), 0.2)
    p[0] = [0, 0, 1, 0, 0]
    assert counts_of("moon", p, [20, 40, 40]).tolist()[2] == [20, 0, 0]


def test_whole_counts_are_each_class_by_largest_remainder():
    counts = counts_of("fedu2", np.array([[0.5, 0.3, 0.2, 0, 0]] * 4), [7, 10, 1, 3])
    assert counts.T.tolist() == [[4, 2, 1, 0, 0], [5, 3, 2, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 0, 0]]


def test_floored_counts_leave_the_rest_out():
    counts = counts_of("l-dawa", np.array([[0.5, 0.3, 0.2, 0, 0]] * 4), [7, 10, 1, 3])
    assert counts.T.tolist() == [[3, 2, 1, 0, 0], [5, 3, 2, 0, 0], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0]]


def test_mass_that_underflowed_goes_to_one_open_client():
    one_client = np.zeros((4, K))
    one_client[:, 2] = 1.0  # holds N/K after the first class; nothing is left for the others to share
    counts = counts_of("moon", one_client)
    assert counts.sum(axis=0).tolist() == SIZES.tolist()
    assert ((counts > 0).sum(axis=0) == 1).all()
    assert counts[2].tolist() == [50, 0, 0, 0]


def test_sinkhorn_gives_equal_clients_and_whole_classes():
    mass = sinkhorn_balance(proportions(1.0), SIZES) * SIZES[:, None]
    assert mass.sum(axis=0) == pytest.approx(np.full(K, SIZES.sum() / K))
    assert mass.sum(axis=1) == pytest.approx(SIZES)


def test_sinkhorn_is_orchestras_on_equal_classes():
    p = np.random.default_rng(3).dirichlet(np.full(6, 1.0), size=4)
    joint = p.T / p.sum()  # Orchestra scales both marginals at once, from the same sums
    for _ in range(100):
        joint = joint / joint.sum(axis=0, keepdims=True) / joint.sum(axis=1, keepdims=True)
    assert sinkhorn_balance(p, np.full(4, 25)) == pytest.approx(joint.T * 4, abs=1e-6)


def test_sinkhorn_survives_a_client_without_mass():
    p = np.zeros((4, K))
    p[:, 0] = 1.0
    assert np.isfinite(sinkhorn_balance(p, SIZES)).all()


@pytest.mark.parametrize("balanced", [False, True])
def test_proportions_are_drawn_and_balanced_only_on_request(balanced):
    drawn = np.random.default_rng(4).dirichlet(np.full(K, 0.3), size=4)
    expected = counts_of("fedu2", sinkhorn_balance(drawn, SIZES) if balanced else drawn)
    found = dirichlet_counts(VARIANTS["fedu2"], SIZES, K, 0.3, balanced, np.random.default_rng(4))
    assert found.tolist() == expected.tolist()
    spread = np.ptp(found.sum(axis=1))
    assert spread <= 4 if balanced else spread > 20  # 240 images of 5 clients


def by_class():
    order = np.random.default_rng(1).permutation(SIZES.sum())
    return [np.sort(part) for part in np.split(order, np.cumsum(SIZES)[:-1])]


@pytest.mark.parametrize("name", VARIANTS)
def test_lists_are_in_the_order_that_the_variant_prescribes(name):
    rng = np.random.default_rng(0)
    counts = dirichlet_counts(VARIANTS[name], SIZES, K, 1.0, False, rng)
    classes = by_class()
    shares = split_dirichlet(VARIANTS[name], classes, counts, rng)
    class_of = {index: c for c, indices in enumerate(classes) for index in indices.tolist()}
    in_class_order = [sorted(s, key=class_of.get) == list(s) for s in map(np.ndarray.tolist, shares)]
    assert all(in_class_order) == (name != "moon")
    for k, share in enumerate(shares):
        assert [sum(class_of[i] == c for i in share.tolist()) for c in range(4)] == counts[k].tolist()
    first = [[i for i in share.tolist() if class_of[i] == 0] for share in shares]
    contiguous = [i for part in first for i in part] == classes[0][: sum(map(len, first))].tolist()
    assert contiguous == (name == "l-dawa")


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(VARIANTS)),
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=6),
    clients=st.integers(1, 8),
    alpha=st.sampled_from([1e-3, 0.01, 0.1, 1.0, 100.0]),
    seed=st.integers(0, 1000),
)
def test_no_draw_deals_more_than_there_is(name, sizes, clients, alpha, seed):
    rng = np.random.default_rng(seed)
    for balanced in (False, True):
        counts = dirichlet_counts(VARIANTS[name], np.array(sizes), clients, alpha, balanced, rng)
        assert counts.shape == (clients, len(sizes))
        assert counts.min() >= 0
        lost = sizes - counts.sum(axis=0)
        assert lost.min() >= 0
        assert lost.max() <= (clients if name == "l-dawa" else 0)
