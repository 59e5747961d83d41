import math

import pytest
import torch
from torch import Tensor

from atoll.evaluation.geometry import geometry


def mean_potential(h: Tensor, pairs: list[tuple[int, int]]) -> float:
    u = h.double() / h.double().norm(dim=1, keepdim=True)
    return math.log(sum(math.exp(-2 * float((u[i] - u[j]).square().sum())) for i, j in pairs) / len(pairs))


@pytest.fixture
def h() -> Tensor:
    return torch.randn(12, 5, generator=torch.Generator().manual_seed(0)) * torch.arange(1.0, 6)


def test_numbers_of_a_known_set() -> None:
    two = torch.tensor([[3.0, 0.0], [0.0, 1.0]])
    found = geometry(
        two, views=(torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[0.6, 0.8], [4.0, 3.0]]))
    )
    assert found["uniformity"] == pytest.approx(-4)
    assert found["alignment"] == pytest.approx(0.8)
    assert found["singular_values"] == pytest.approx([3, 1])
    assert found["effective_rank"] == pytest.approx(1.75476535)


def test_every_pair_once_and_lengths_only_for_the_rank(h: Tensor) -> None:
    found, scaled = geometry(h), geometry(h * 7)
    pairs = [(i, j) for i in range(12) for j in range(i)]
    assert found["uniformity"] == pytest.approx(mean_potential(h, pairs), rel=1e-5)
    assert scaled["uniformity"] == pytest.approx(found["uniformity"], rel=1e-5)
    values = torch.linalg.svdvals(h.double())
    assert found["singular_values"] == pytest.approx(values.tolist())
    p = values / values.sum()
    assert found["effective_rank"] == pytest.approx(float((-(p * p.log()).sum()).exp()))
    rows = torch.linspace(0.1, 3, 12)[:, None]
    assert geometry(h * rows)["effective_rank"] != pytest.approx(found["effective_rank"], rel=1e-3)


def test_clients_part_the_pairs(h: Tensor) -> None:
    ids = torch.tensor([4, 4, 4, 0, 0, 2, 2, 2, 2, 4, 0, 9])  # one client holds a single image
    found = geometry(h[:3], clients=(h, ids))
    pairs = [(i, j) for i in range(12) for j in range(i)]
    within = [(i, j) for i, j in pairs if ids[i] == ids[j]]
    across = [(i, j) for i, j in pairs if ids[i] != ids[j]]
    assert found["clients_uniformity"] == pytest.approx(mean_potential(h, pairs), rel=1e-5)
    assert found["clients_uniformity_intra"] == pytest.approx(mean_potential(h, within), rel=1e-5)
    assert found["clients_uniformity_inter"] == pytest.approx(mean_potential(h, across), rel=1e-5)


@pytest.mark.parametrize("ids", [[3] * 12, list(range(12))])
def test_without_pairs_on_both_sides_there_is_no_decomposition(h: Tensor, ids: list[int]) -> None:
    found = geometry(h, clients=(h, torch.tensor(ids)))
    assert not any(name.startswith("clients") for name in found)


def test_a_collapsed_representation_is_measured_not_refused() -> None:
    same = torch.ones(6, 4)
    found = geometry(same, views=(same, same))
    assert found["uniformity"] == pytest.approx(0, abs=1e-5)
    assert found["alignment"] == 0
    assert found["effective_rank"] == pytest.approx(1, abs=1e-4)
    zero = geometry(torch.zeros(6, 4))
    assert math.isfinite(zero["effective_rank"])
    assert math.isfinite(zero["uniformity"])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_representations_that_are_not_finite_are_refused(h: Tensor, bad: float) -> None:
    h[3, 1] = bad
    with pytest.raises(ValueError, match=r"must be finite and \(N, d\), got \(12, 5\) with other values"):
        geometry(h)
    with pytest.raises(ValueError, match=r"must be finite and \(N, d\), got \(5,\)$"):
        geometry(h[0])
