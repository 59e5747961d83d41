import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.aggregation import update_geometry
from atoll.aggregation.update_geometry import Reference
from atoll.functional import angular_divergence
from tests.folds import model


def close_to(w, g):
    """‖w − g‖², ⟨g, w⟩, ‖w‖², ‖g‖² by a slow loop."""
    pairs = list(zip(w.double().flatten().tolist(), g.double().flatten().tolist(), strict=True))
    return (
        math.fsum((a - b) ** 2 for a, b in pairs),
        math.fsum(a * b for a, b in pairs),
        math.fsum(a * a for a, _ in pairs),
        math.fsum(b * b for _, b in pairs),
    )


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 999),
    n=st.sampled_from([0, 1, 7, 16, 17, 32, 50, 64, 77]),
    step=st.sampled_from([1e-4, 1.0, 1e3]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_all_numbers_agree_with_a_slow_loop(seed, n, step, dtype):
    draw = torch.Generator().manual_seed(seed)
    g = torch.randn(n, generator=draw, dtype=torch.float64)
    w = (g + step * torch.randn(n, generator=draw, dtype=torch.float64)).to(dtype)
    g = g.to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(update_geometry, "BLOCK", 16)  # so that blocks and parts have to be put together
        patch.setattr(update_geometry, "PART", 2)
        found = Reference({"x": g}).measure({"x": w})
    moved, inner, update, length = close_to(w, g)
    assert found.moved["x"] == pytest.approx(moved, rel=1e-5)
    assert found.update["x"] == pytest.approx(update, rel=1e-5)
    assert found.model["x"] == pytest.approx(length, rel=1e-5)
    assert found.inner["x"] == pytest.approx(inner, abs=3e-5 * math.sqrt(update * length))


def test_a_small_step_of_a_long_vector_is_not_drowned():
    """By ‖w‖² + ‖g‖² − 2⟨g, w⟩ in float32, this step would be noise."""
    g = 1000 * torch.randn(300_000, generator=torch.Generator().manual_seed(0))
    w = g + torch.randn(300_000, generator=torch.Generator().manual_seed(1))
    exact = float((w.double() - g.double()).square().sum())
    assert Reference({"x": g}).measure({"x": w}).moved["x"] == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("scale", [1e-9, 1e-4, 0.3, 5.0, 1e4, 1e9])
def test_cosines_are_those_of_the_function(scale):
    """Of equal and of very different lengths."""
    g, w = model(1, scale=scale), model(2)
    expected = angular_divergence(
        {n: x.double() for n, x in g.items() if x.is_floating_point()},
        {n: x.double() for n, x in w.items() if x.is_floating_point()},
    )
    found = Reference(g).measure(w)
    for name, cosine in expected.items():
        assert found.cosine([name]) == pytest.approx(float(cosine), abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_equal_models_have_cosine_exactly_one_and_distance_zero(dtype):
    for seed in range(20):
        w = model(seed, dtype)
        found = Reference(w).measure({name: tensor.clone() for name, tensor in w.items()})
        assert found.distance() == 0
        assert found.cosine() == 1
        assert all(found.cosine([name]) == 1 for name in found.moved)
        minus = Reference(w).measure({name: -tensor for name, tensor in w.items()})
        assert minus.cosine() == pytest.approx(-1, abs=1e-6)


def test_zero_on_either_side_is_cosine_one():
    zero, some = {"x": torch.zeros(5)}, {"x": torch.ones(5)}
    for one, other in ((zero, some), (some, zero), (zero, zero)):
        assert Reference(one).measure(other).cosine() == 1


def test_counters_are_left_out():
    assert set(Reference(model(1)).measure(model(2)).moved) == {
        "conv.weight",
        "conv.bias",
        "bn.running_mean",
        "bn.running_var",
    }


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
def test_values_beyond_all_bounds_show(bad):
    w = model(1)
    w["conv.weight"][1, 0, 1, 0] = bad
    found = Reference(model(1)).measure(w)
    assert not math.isfinite(found.moved["conv.weight"])
    assert math.isfinite(found.moved["conv.bias"])


def test_memory_layout_and_alignment_change_no_bit():
    """A worker's tensors lie elsewhere, and not as channels-last, but the same run gives the same numbers."""
    draw = torch.Generator().manual_seed(0)
    g, w = (torch.randn(64, 64, 3, 3, generator=draw) for _ in range(2))
    plain = Reference({"x": g}).measure({"x": w})
    shifted = torch.empty(w.numel() + 1)[1:].view_as(w).copy_(w)
    last = w.to(memory_format=torch.channels_last)
    for other in (shifted, last):
        assert Reference({"x": g}).measure({"x": other}) == plain
        assert Reference({"x": other}).measure({"x": g}).moved == plain.moved


@pytest.mark.parametrize("scale", [1.0, 1e3])  # with the inner product by the law of cosines, and directly
def test_threads_and_alignment_of_many_blocks_change_no_bit(scale):
    draw = torch.Generator().manual_seed(0)
    g, w = torch.randn(2, 9 * update_geometry.BLOCK + 5, generator=draw).unbind()
    w = scale * w
    shifted = torch.empty(len(w) + 1)[1:].copy_(w)
    threads = torch.get_num_threads()
    try:
        found = []
        for number in (1, 2, 3, 8):
            torch.set_num_threads(number)
            found += [Reference({"x": g}).measure({"x": tensor}) for tensor in (w, shifted)]
    finally:
        torch.set_num_threads(threads)
    assert all(geometry == found[0] for geometry in found)
