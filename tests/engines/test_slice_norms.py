"""Norms of slices against a loop over numbers."""

import math

import pytest
import torch

from atoll.components.declaration import TensorSpec, UpTo
from atoll.engines.slice_norms import slice_norms

MATRIX, ROWS = TensorSpec((2, 3)), TensorSpec((UpTo(9), 3))
DRAW = torch.Generator().manual_seed(0)
TWO, FIVE = torch.randn(2, 3, generator=DRAW), torch.randn(5, 3, generator=DRAW)


def slow(*tensors):
    return math.sqrt(math.fsum(value**2 for tensor in tensors for value in tensor.flatten().tolist()))


def test_all_tensors_of_a_slice_are_one_vector():
    """Counters are no part of it, and the number of rows counts if one tensor has a fixed number."""
    slices = {
        "fixed": {"a": TWO, "n": torch.tensor(7)},
        "mixed": {"a": TWO, "b": FIVE},
        "rows": {"a": TWO, "b": FIVE},
    }
    specs = {
        "fixed": {"a": MATRIX, "n": TensorSpec((), torch.int64)},
        "mixed": {"a": MATRIX, "b": ROWS},
        "rows": {"a": ROWS, "b": ROWS},
    }
    norms = slice_norms(slices, specs)
    assert norms == pytest.approx(
        {"fixed": slow(TWO), "mixed": slow(TWO, FIVE), "rows": slow(TWO, FIVE) / math.sqrt(7)}, rel=1e-6
    )


def test_rows_of_length_one_have_no_norm_and_what_is_not_sent_has_norm_zero():
    unit = TensorSpec((UpTo(9), 3), unit_rows=True)
    sent = torch.nn.functional.normalize(FIVE, dim=1)
    assert slice_norms({"unit": sent, "rows": None}, {"unit": unit, "rows": ROWS}) == {"rows": 0}


def test_a_norm_does_not_overflow_where_those_of_its_tensors_do_not():
    large = torch.tensor([[1.5e19, 0.0, 0.0]])
    norms = slice_norms({"x": (large, large)}, {"x": (TensorSpec((1, 3)), TensorSpec((1, 3)))})
    assert norms["x"] == pytest.approx(1.5e19 * math.sqrt(2), rel=1e-6)
