import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor

from atoll.evaluation import neighbours
from atoll.evaluation.knn import knn_accuracy

from .sets import blobs


def slow(
    train_h: Tensor, train_y: Tensor, test_h: Tensor, test_y: Tensor, k: int, temperature: float
) -> float:
    bank, queries = train_h.double().numpy(), test_h.double().numpy()
    correct = 0
    for query, truth in zip(queries, test_y.tolist(), strict=True):
        cosines = [float(row @ query / np.linalg.norm(row) / np.linalg.norm(query)) for row in bank]
        nearest = sorted(range(len(bank)), key=lambda i: (-cosines[i], i))[:k]
        votes: dict[int, float] = {}
        for i in nearest:
            label = int(train_y[i])
            votes[label] = votes.get(label, 0.0) + np.exp(cosines[i] / temperature)
        correct += min(votes, key=lambda label: (-votes[label], label)) == truth
    return correct / len(queries)


@given(
    n=st.integers(4, 40),
    d=st.integers(2, 8),
    classes=st.integers(1, 5),
    k=st.integers(1, 40),
    temperature=st.sampled_from([0.005, 0.1, 1.0]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25, deadline=None)
def test_agrees_with_a_slow_loop(n: int, d: int, classes: int, k: int, temperature: float, seed: int) -> None:
    sets = blobs(n, d, classes, spread=1.5, seed=seed)
    k = min(k, n)
    assert knn_accuracy(*sets, k=k, temperature=temperature) == pytest.approx(slow(*sets, k, temperature))


@pytest.mark.parametrize("k", [1, 20, 200])
def test_agrees_with_scikit_learn(k: int) -> None:
    train_h, train_y, test_h, test_y = blobs(400, 16, 5, spread=2.0)
    reference = KNeighborsClassifier(
        k, metric="cosine", algorithm="brute", weights=lambda distance: np.exp((1 - distance) / 0.1)
    ).fit(train_h.double().numpy(), train_y.numpy())
    expected = reference.score(test_h.double().numpy(), test_y.numpy())
    assert 0.2 < expected < 1
    assert knn_accuracy(train_h, train_y, test_h, test_y, k=k) == pytest.approx(expected)


def test_200_neighbours_vote_by_default() -> None:
    """Of equal images, the first 200 vote: a tie of classes 0 and 1, which one more or fewer would break."""
    labels = torch.tensor([1] * 100 + [0] * 100 + [1])
    assert knn_accuracy(torch.ones(201, 2), labels, torch.ones(1, 2), torch.tensor([0])) == 1


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = blobs(100, 8, 4, spread=1.5)
    whole = knn_accuracy(*sets, k=10)
    monkeypatch.setattr(neighbours, "SIMILARITIES_AT_ONCE", 300)
    assert knn_accuracy(*sets, k=10) == whole


def test_equally_near_neighbours_vote_in_their_order() -> None:
    train_h = torch.tensor([[1.0, 0.0]]).repeat(6, 1)
    query, zero = torch.tensor([[1.0, 0.0]]), torch.tensor([0])
    # The first three of six equal neighbours are of classes 1, 0, 0.
    assert knn_accuracy(train_h, torch.tensor([1, 0, 0, 1, 1, 1]), query, zero, k=3) == 1.0
    assert knn_accuracy(train_h, torch.tensor([1, 1, 0, 0, 0, 0]), query, zero, k=3) == 0.0


def test_classes_with_equal_votes_the_lowest_wins() -> None:
    train_h = torch.tensor([[1.0, 0.0]]).repeat(2, 1)
    query = torch.tensor([[2.0, 0.0]])
    assert knn_accuracy(train_h, torch.tensor([3, 1]), query, torch.tensor([1]), k=2) == 1.0


def test_lengths_do_not_matter() -> None:
    train_h, train_y, test_h, test_y = blobs(60, 8, 4, spread=1.5)
    scale = torch.linspace(0.1, 50, 60)[:, None]
    assert knn_accuracy(train_h * scale, train_y, test_h * 7, test_y, k=5) == knn_accuracy(
        train_h, train_y, test_h, test_y, k=5
    )


def test_k_beyond_the_training_set_shrinks_with_a_warning() -> None:
    sets = blobs(50, 8, 4, spread=1.5)
    with pytest.warns(UserWarning, match="200 neighbours and there are 50"):
        shrunk = knn_accuracy(*sets, k=200)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert knn_accuracy(*sets, k=50) == shrunk


def test_what_does_not_fit_is_refused_with_its_shapes() -> None:
    train_h, train_y, test_h, test_y = blobs(10, 4, 2, spread=1.0)
    with pytest.raises(ValueError, match=r"\(10, 4\) and \(9,\)"):
        knn_accuracy(train_h, train_y[:9], test_h, test_y)
    with pytest.raises(ValueError, match=r"\(5, 3\)"):
        knn_accuracy(train_h, train_y, test_h[:, :3], test_y)
    with pytest.raises(ValueError, match="none of them empty"):
        knn_accuracy(train_h, train_y, test_h[:0], test_y[:0])
    with pytest.raises(ValueError, match="integers from 0"):
        knn_accuracy(train_h, train_y - 1, test_h, test_y)
    with pytest.raises(ValueError, match="integers from 0"):
        knn_accuracy(train_h, train_y.float(), test_h, test_y)
    with pytest.raises(ValueError, match="num_classes is 1"):
        knn_accuracy(train_h, train_y, test_h, test_y, k=3, num_classes=1)
    with pytest.raises(ValueError, match="positive"):
        knn_accuracy(train_h, train_y, test_h, test_y, k=0)


def test_labels_may_be_bytes() -> None:
    h, y, test_h, test_y = blobs(40, 3, 4, spread=1.0)
    found = knn_accuracy(h, y.to(torch.uint8), test_h, test_y.to(torch.uint8), 5)
    assert found == knn_accuracy(h, y, test_h, test_y, 5)
