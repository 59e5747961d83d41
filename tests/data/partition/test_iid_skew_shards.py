"""Deals that need no luck."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.data.partition.iid_skew_shards import largest_remainder, split_evenly, split_shards, split_skewed


def rng():
    return np.random.default_rng(0)


def classes(*sizes):
    order = np.random.default_rng(1).permutation(sum(sizes))
    return [np.sort(part) for part in np.split(order, np.cumsum(sizes)[:-1])]


def distinct(shares):
    together = np.concatenate(shares)
    return len(set(together.tolist())) == len(together)


def test_even_parts_are_random_and_sorted():
    parts = split_evenly(np.arange(100, 123), 5, rng())
    assert [len(part) for part in parts] == [5, 5, 5, 4, 4]
    assert sorted(np.concatenate(parts).tolist()) == list(range(100, 123))
    assert all((np.diff(part) > 0).all() for part in parts)
    assert not np.array_equal(parts[0], np.arange(100, 105))


@pytest.mark.parametrize("beta", [0.1, 0.2, 0.3, 0.6, 0.7, 0.9])
def test_skew_floors_what_is_written_and_not_its_float(beta):
    shares = split_skewed(classes(*[1000] * 10), 10, beta, rng())
    assert [len(share) for share in shares] == [1000] * 10  # floats would lose one at 0.9, 0.7 and others
    own = [len(np.intersect1d(share, classes(*[1000] * 10)[k])) for k, share in enumerate(shares)]
    assert min(own) >= round(1000 * (1 - beta))


def test_no_skew_is_uniform_and_full_skew_exclusive():
    by_class = classes(*[100] * 10)
    exclusive = split_skewed(by_class, 5, 0.0, rng())
    for k, share in enumerate(exclusive):
        assert set(share) == set(by_class[2 * k]) | set(by_class[2 * k + 1])
    uniform = split_skewed(by_class, 5, 1.0, rng())
    counts = np.array([[len(np.intersect1d(share, own)) for own in by_class] for share in uniform])
    assert counts.min() > 5
    assert counts.sum(axis=1).tolist() == [200] * 5


def test_shards_that_fit_exactly_are_disjoint():
    by_class = classes(7, 9, 11, 13, 5, 6)
    shares = split_shards(by_class, 3, 2, rng())
    for k, share in enumerate(shares):
        assert set(share) == set(by_class[2 * k]) | set(by_class[2 * k + 1])


def test_shards_are_shared_where_there_are_more_clients():
    by_class = classes(*[60] * 4)
    shares = split_shards(by_class, 6, 2, rng())
    assert distinct(shares)
    assert sum(map(len, shares)) == 240
    held = [[c for c in range(4) if len(np.intersect1d(share, by_class[c]))] for share in shares]
    assert held == [[0, 1], [2, 3]] * 3
    assert {len(share) for share in shares} == {40}


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    clients=st.integers(1, 6),
    beta=st.integers(0, 20).map(lambda twentieths: twentieths / 20),
)
def test_skew_gives_each_client_its_exact_share_of_distinct_samples(sizes, clients, beta):
    shares = split_skewed(classes(*sizes), clients, beta, rng())
    expected = sum(sizes) * (20 - round(20 * beta)) // (20 * clients) + sum(sizes) * round(20 * beta) // (
        20 * clients
    )
    assert [len(share) for share in shares] == [expected] * clients
    assert distinct(shares)


@settings(max_examples=50, deadline=None)
@given(weights=st.lists(st.floats(0, 100), min_size=1, max_size=8).filter(sum), total=st.integers(0, 1000))
def test_largest_remainder_is_whole_and_within_one(weights, total):
    counts = largest_remainder(np.array(weights), total)
    quotas = np.array(weights) / sum(weights) * total
    assert counts.sum() == total
    assert counts.min() >= 0
    assert np.abs(counts - quotas).max() < 1


def test_largest_remainder_rounds_up_the_largest():
    assert largest_remainder(np.array([1.4, 1.35, 1.25]), 4).tolist() == [2, 1, 1]
