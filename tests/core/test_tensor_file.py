import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.tensor_file import _NAMES, serialise

SHAPES = [(), (0, 4), (3,), (2, 3, 5)]


@st.composite
def tensors(draw):
    dtype, shape = draw(st.sampled_from(list(_NAMES))), draw(st.sampled_from(SHAPES))
    values = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    return values.to(dtype)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.text(), tensors(), max_size=6), st.text())
def test_the_bytes_are_those_of_the_library(named, text):
    metadata = {"key": text}  # a single one, because the library's map has a random order
    named = {name: tensor for name, tensor in named.items() if name != "__metadata__"}
    assert b"".join(serialise(named, metadata)) == safetensors.torch.save(named, metadata)


def test_the_pieces_are_the_tensors_own_memory():
    tensor = torch.zeros(1000)
    pieces = serialise({"a": tensor}, {})
    tensor += 1
    assert bytes(pieces[1]) == tensor.numpy().tobytes()


def test_a_type_that_the_format_lacks_is_named():
    with pytest.raises(TypeError, match=r"'a' has the type torch.complex128"):
        serialise({"a": torch.zeros(2, dtype=torch.complex128)}, {})
