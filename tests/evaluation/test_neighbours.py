"""Nearest neighbours against scikit-learn and slow loops, and measures with a known answer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.neighbors import NearestNeighbors

from atoll.evaluation import nearest, neighbours, same_client_share, same_image_retrieval


@given(st.integers(0, 2**31), st.integers(2, 40), st.integers(1, 9), st.integers(1, 12))
def test_the_nearest_are_those_of_scikit_learn(seed: int, size: int, asked: int, k: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    bank, queries = (torch.randn(n, 5, generator=generator) for n in (size, asked))
    theirs = NearestNeighbors(n_neighbors=min(k, size), metric="cosine").fit(bank.numpy())
    distances, rows = theirs.kneighbors(queries.numpy())
    found, similar = nearest(bank, queries, k)
    assert torch.allclose(1 - similar, torch.from_numpy(distances).float(), atol=1e-5)
    cosine = torch.nn.functional.cosine_similarity(queries[:, None], bank[None], dim=2)
    assert torch.allclose(cosine.gather(1, found), similar, atol=1e-5)
    assert torch.equal(found, torch.from_numpy(rows)) or similar.diff(dim=1).abs().min() < 1e-5


@given(st.integers(0, 2**31), st.integers(1, 60), st.integers(1, 4), st.integers(1, 60))
def test_of_equally_similar_images_the_first_are_nearest(seed: int, size: int, kinds: int, k: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    kind = torch.randint(kinds, (size,), generator=draw)
    lengths = torch.randint(1, 9, (size, 1), generator=draw)
    towards = torch.eye(4)[torch.randperm(4, generator=draw)[:kinds]]
    found, similar = nearest(lengths * towards[kind], torch.tensor([[0.4, 0.3, 0.2, 0.1]]), k)
    cosines = (towards[kind] @ torch.tensor([0.4, 0.3, 0.2, 0.1])).tolist()
    expected = sorted(range(size), key=lambda place: (-cosines[place], place))[:k]
    assert found.tolist() == [expected]
    assert similar[0].tolist() == sorted(similar[0].tolist(), reverse=True)


def test_an_embedding_that_is_no_number_disturbs_no_other() -> None:
    bank = torch.eye(3)[torch.arange(40) % 3]
    bank[7] = torch.nan
    found, similar = nearest(bank, torch.eye(3), 5)
    for query, row in enumerate(found.tolist()):
        assert row[0] == 7
        assert row[1:] == [place for place in range(query, 40, 3) if place != 7][:4]
    assert similar[:, 1:].tolist() == [[1.0] * 4] * 3


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    bank = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    own = torch.arange(0, 50, 3)
    whole = nearest(bank, bank[own], 5, own)
    monkeypatch.setattr(neighbours, "SIMILARITIES_AT_ONCE", 100)
    blocks = nearest(bank, bank[own], 5, own)
    assert torch.equal(whole[0], blocks[0])
    assert torch.allclose(whole[1], blocks[1], rtol=0, atol=1e-6)  # a smaller product may round otherwise


def test_an_image_is_not_its_own_neighbour_but_its_copy_is() -> None:
    bank = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0], [1.0, 1.0]])
    found, similar = nearest(bank, bank[:1], 9, torch.tensor([0]))
    assert found.tolist() == [[2, 3, 1]]
    assert similar[0, 0] == 1


def test_retrieval_is_the_share_of_views_that_find_their_image() -> None:
    first = torch.eye(4)
    second = torch.eye(4)[[0, 1, 3, 2]] + 0.1 * torch.eye(4)  # the last two find each other
    assert same_image_retrieval(first, first) == 1
    assert same_image_retrieval(first, second) == 0.5


def test_features_that_do_not_match_are_refused() -> None:
    bank = torch.eye(4, 3)
    for queries in (torch.eye(4, 2), torch.ones(3), torch.ones(0, 3)):
        with pytest.raises(ValueError, match=r"features must be .* got bank \(4, 3\) and queries \("):
            nearest(bank, queries, 1)
    for k in (0, -1):
        with pytest.raises(ValueError, match=f"k must be positive, got {k}"):
            nearest(bank, bank, k)
    with pytest.raises(ValueError, match=r"a row for each of 4 queries, got shape \(1,\)"):
        nearest(bank, bank, 1, torch.tensor([0]))


def test_views_of_other_images_are_refused() -> None:
    for rows in (2, 6):
        with pytest.raises(ValueError, match=f"of the same images, got 4 and {rows} rows"):
            same_image_retrieval(torch.ones(4, 3), torch.ones(rows, 3))
    with pytest.raises(ValueError, match=r"got view1 \(0, 3\) and view2 \(0, 3\)"):
        same_image_retrieval(torch.ones(0, 3), torch.ones(0, 3))


@given(st.integers(0, 2**31))
def test_the_share_of_the_same_client_is_that_of_a_loop(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    clients = torch.randint(0, 3, (20,), generator=generator)
    queries = torch.randperm(20, generator=generator)[:6]
    found = torch.stack([torch.randperm(20, generator=generator)[:4] for _ in queries])
    own, chance = 0.0, 0.0
    for query, row in zip(queries.tolist(), found.tolist(), strict=True):
        own += sum(clients[i] == clients[query] for i in row) / 4 / 6
        others = [i for i in range(20) if i != query]
        chance += sum(bool(clients[i] == clients[query]) for i in others) / 19 / 6
    assert same_client_share(found, clients, queries) == pytest.approx((float(own), chance))
