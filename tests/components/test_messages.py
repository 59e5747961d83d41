"""Geometry of an update and choice of a model, against vectors in float64."""

import math

import pytest
import torch

from atoll.components.messages import Deployment, UpdateGeometry

DRAWS = torch.Generator().manual_seed(0)
MODEL, UPDATED = (
    {
        name: torch.randn(size, generator=DRAWS, dtype=torch.float64)
        for name, size in (("a", 5), ("b", 3), ("c", 2))
    }
    for _ in range(2)
)


def measured(model, updated):
    """The squares and products of each tensor, added up one by one."""

    def products(one, other):
        return {
            name: sum(x * y for x, y in zip(one[name].tolist(), other[name].tolist(), strict=True))
            for name in one
        }

    moved = {name: updated[name] - model[name] for name in model}
    return UpdateGeometry(
        products(moved, moved), products(model, updated), products(updated, updated), products(model, model)
    )


def vector(model, names):
    return torch.cat([model[name] for name in names])


@pytest.mark.parametrize(
    ("without", "names"), [((), "abc"), ({"b"}, "ac"), (["a", "c"], "b"), ({"another"}, "abc")]
)
def test_distance_and_norm_are_those_of_the_vector_of_the_other_tensors(without, names):
    geometry, g, w = measured(MODEL, UPDATED), vector(MODEL, names), vector(UPDATED, names)
    assert geometry.distance(without) == pytest.approx(float((w - g).norm()))
    assert geometry.norm(without) == pytest.approx(float(g.norm()))


def test_without_tensors_distance_and_norm_are_0():
    geometry = measured(MODEL, UPDATED)
    assert geometry.distance(MODEL.keys()) == geometry.norm(MODEL.keys()) == 0


@pytest.mark.parametrize("names", [None, ["a"], ["c", "b"]])
def test_the_cosine_is_that_of_the_concatenated_vectors(names):
    g, w = vector(MODEL, names or "abc"), vector(UPDATED, names or "abc")
    expected = float(torch.nn.functional.cosine_similarity(g, w, dim=0))
    assert measured(MODEL, UPDATED).cosine(names) == pytest.approx(expected)
    turned = {name: -3 * tensor for name, tensor in UPDATED.items()}
    assert measured(MODEL, turned).cosine(names) == pytest.approx(-expected)


def test_the_cosine_of_equal_vectors_is_exactly_1_and_of_a_zero_vector_1():
    for model in (MODEL, {"a": torch.full((3,), 0.1, dtype=torch.float64)}):
        assert measured(model, model).cosine() == 1
    zeros = {name: torch.zeros_like(tensor) for name, tensor in MODEL.items()}
    assert measured(zeros, UPDATED).cosine() == measured(MODEL, zeros).cosine() == 1
    assert measured(zeros, zeros).cosine() == measured(MODEL, UPDATED).cosine([]) == 1


@pytest.mark.parametrize("square", [1e-200, 1.0, 1e200])
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_cosine_is_in_range_despite_rounding_and_for_squares_whose_product_overflows(square, sign):
    inner = sign * square * (1 + 1e-12)
    geometry = UpdateGeometry(
        {"a": 1.0}, {"a": inner}, {"a": square}, {"a": math.nextafter(square, math.inf)}
    )
    assert geometry.cosine() == sign


def test_a_client_uses_the_model_of_its_choice_and_the_first_one_without():
    models = {name: {"weight": torch.tensor(value)} for name, value in (("first", 1.0), ("second", 2.0))}
    deployment = Deployment(models, {3: "second", 4: "first"})
    assert [deployment.name_of(client) for client in (0, 3, 4)] == ["first", "second", "first"]
    assert [float(deployment.model_of(client)["weight"]) for client in (0, 3, 4)] == [1, 2, 1]
    assert Deployment({}).model_of(0) == {}
