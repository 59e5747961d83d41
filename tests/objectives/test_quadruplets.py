import collections

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.objectives.quadruplets import draw_quadruplets

labels_of_a_client = st.lists(st.sampled_from([0, 2, 3, 7]), min_size=1, max_size=30).map(torch.tensor)


def draw(labels, seed=0):
    return draw_quadruplets(labels, torch.Generator().manual_seed(seed))


@settings(max_examples=150, deadline=None)
@given(labels_of_a_client, st.integers(0, 2**31))
def test_members_have_the_right_classes(labels, seed):
    rows = draw(labels, seed)
    counts = collections.Counter(labels.tolist())
    assert rows.shape == (2 if len(counts) == 1 else 4, len(labels))
    for a, p, *negatives in rows.T.tolist():
        assert labels[p] == labels[a]
        assert (p == a) == (counts[labels[a].item()] == 1)
        assert all(labels[n] != labels[a] for n in negatives)
        if len(counts) >= 3:
            assert labels[negatives[0]] != labels[negatives[1]]
        if len(counts) == 2:
            n1, n2 = negatives
            assert (n1 == n2) == (counts[labels[n1].item()] == 1)
    assert rows[0].tolist() == list(range(len(labels)))


def frequencies(labels, position, row):
    seen = collections.Counter(draw(labels, seed)[row, position].item() for seed in range(3000))
    return {sample: count / 3000 for sample, count in seen.items()}


def test_positives_are_uniform_over_the_others_of_the_class():
    labels = torch.tensor([5, 1, 5, 5, 1, 2])
    assert frequencies(labels, 2, 1) == pytest.approx({0: 1 / 2, 3: 1 / 2}, abs=0.04)


@pytest.mark.parametrize("row", [2, 3])
def test_negatives_are_uniform_over_classes_then_over_their_samples(row):
    labels = torch.tensor([5, 1, 1, 1, 2, 5])
    expected = {1: 1 / 6, 2: 1 / 6, 3: 1 / 6, 4: 1 / 2}
    assert frequencies(labels, 0, row) == pytest.approx(expected, abs=0.04)


def test_both_negatives_of_a_two_class_client_are_drawn_from_the_other_class():
    labels = torch.tensor([0, 0, 1, 1, 1])
    assert frequencies(labels, 0, 3) == pytest.approx({2: 1 / 3, 3: 1 / 3, 4: 1 / 3}, abs=0.04)


def test_a_draw_follows_its_generator():
    labels = torch.arange(40) % 5
    assert torch.equal(draw(labels, 3), draw(labels, 3))
    assert not torch.equal(draw(labels, 3), draw(labels, 4))
