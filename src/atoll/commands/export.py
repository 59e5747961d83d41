"""``atoll export``: converts a finished encoder for other programs."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from atoll.commands.evaluate import find_encoder
from atoll.core.errors import UserError, did_you_mean
from atoll.core.extras import require
from atoll.core.files import write_whole
from atoll.models import Encoder, load_encoder


def export_run(run_or_encoder: Path, format: str, output: Path | None = None) -> Path:
    """Export the encoder of a finished run.

    Args:
        run_or_encoder: The run's folder, or the encoder's file.
        format: A name in `FORMATS`.
        output: File to write; None for ``encoder-export.FORMAT`` next to the encoder.

    Returns:
        The file.

    Raises:
        UserError: There is no encoder, or see `export`.
    """
    path = find_encoder(run_or_encoder)
    output = output or path.with_name(f"encoder-export.{format}")
    export(load_encoder(path), output, format)
    return output


def export(encoder: Encoder, path: Path, format: str) -> None:
    """Convert an encoder for other programs.

    Args:
        encoder: The encoder.
        path: File to write.
        format: A name in `FORMATS`.

    Raises:
        UserError: The format is unknown, or a library is missing.
    """
    if format not in FORMATS:
        raise UserError(f"unknown format {format!r}; {did_you_mean(format, FORMATS)}")
    write_whole(path, FORMATS[format](encoder))


def _weights(encoder: Encoder) -> bytes:
    state = {
        name: tensor.detach().cpu().contiguous() for name, tensor in sorted(encoder.library_state().items())
    }
    return safetensors.torch.save(state)


def _example(encoder: Encoder) -> tuple[Tensor, ...]:
    about = encoder.metadata
    return (torch.zeros(2, about["channels"], about["image_size"], about["image_size"]),)


def _pt2(encoder: Encoder) -> bytes:
    batch = {0: torch.export.Dim("batch", min=1)}
    program = torch.export.export(encoder.eval(), _example(encoder), dynamic_shapes=(batch,))
    file = io.BytesIO()
    torch.export.save(program, file)
    return file.getvalue()


def _onnx(encoder: Encoder) -> bytes:
    require("onnxscript", "onnx", "the format ONNX")
    batch = {0: torch.export.Dim("batch", min=1)}
    program = torch.onnx.export(
        encoder.eval(), _example(encoder), dynamo=True, dynamic_shapes=(batch,), verbose=False
    )
    assert program is not None  # noqa: S101
    return bytes(program.model_proto.SerializeToString())


FORMATS: dict[str, Callable[[Encoder], bytes]] = {"onnx": _onnx, "pt2": _pt2, "safetensors": _weights}
