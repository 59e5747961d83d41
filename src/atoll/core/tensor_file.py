"""The safetensors format, written without copies.

The library's own `save` copies all tensors while it holds the interpreter's lock, which stops the training that
runs while a checkpoint is written. The format is fixed: the header's size in eight bytes, the header as JSON, and
the tensors' values. The bytes written here are the same as the library's, which can read them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch import Tensor

Piece = bytes | memoryview

# In the order in which the library sorts tensors in a file: the widest and last first.
_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}
_RANKS = {dtype: -rank for rank, dtype in enumerate(_NAMES)}


def can_store(tensor: Tensor) -> bool:
    """Whether the format has the tensor's type and layout."""
    return tensor.layout == torch.strided and tensor.dtype in _NAMES


def serialise(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> list[Piece]:
    """Return the pieces of a safetensors file: its header, then each tensor's own memory.

    Args:
        tensors: Dense tensors on the CPU; their values must not change before the pieces are written.
        metadata: Text by name.

    Raises:
        TypeError: The format does not support a tensor's type.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    pieces: list[Piece] = []
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise TypeError(f"{name!r} has the type {tensor.dtype}, which safetensors cannot store")
    for name, tensor in sorted(tensors.items(), key=lambda pair: (_RANKS[pair[1].dtype], pair[0])):
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        pieces.append(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)
    return [len(encoded).to_bytes(8, "little") + encoded, *pieces]
