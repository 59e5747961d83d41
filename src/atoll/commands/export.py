"""``atoll export``: converts a finished encoder for other programs."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.commands.model_folders import FOLDERS
from atoll.commands.run_files import find_one_encoder
from atoll.core.errors import UserError, did_you_mean
from atoll.core.extras import require
from atoll.core.files import write_whole
from atoll.core.outputs import check_output
from atoll.core.provenance import version
from atoll.core.run_folder import Run
from atoll.core.text import first_line, short
from atoll.models import Encoder, load_encoder
from atoll.models.encoder import input_metadata
from atoll.models.exported import EXTRA, INPUT, KEY, OUTPUT, is_ours
from atoll.models.files import library_bytes
from atoll.recipe.recipe import recipe_digest, recipe_of
from atoll.report.folders import read_folder
from atoll.report.wording import without_folders

_REMEDY = "in its code, write images.shape[0] in place of len(images), or choose the format safetensors"
Provenance = Mapping[str, Any]


def export_run(
    run_or_encoder: Path, format: str, output: Path | None = None, encoder: Encoder | None = None
) -> Path:
    """Export the encoder of a finished run.

    Args:
        run_or_encoder: The run's folder, or the encoder's file.
        format: A name in `FORMATS` or `FOLDERS`.
        output: File or folder to write; None for ``encoder-export.FORMAT`` (a folder: ``encoder-export-FORMAT``)
            next to the encoder, after its name if it is one of several.
        encoder: The encoder, if it is loaded already.

    Returns:
        The file or folder.

    Raises:
        UserError: There is no encoder, the output belongs to a run, or see `export`.
    """
    if not isinstance(format, str):
        raise UserError(f"the format is {short(format)}; {did_you_mean('', [*FORMATS, *FOLDERS])}")
    path = find_one_encoder(run_or_encoder)
    if output:
        check_output(output)
        if format in FORMATS and output.suffix != f".{format}":
            raise UserError(f"{output} must end in .{format}, by which the file is recognised")
    run = Run(path.parent)
    model = path.stem.removeprefix("encoder").removeprefix("-")
    name = f"encoder-{model}-export" if run.exists() and model else "encoder-export"
    output = output or path.with_name(f"{name}-{format}" if format in FOLDERS else f"{name}.{format}")
    about = provenance(run, model) if run.exists() and run.finished else {}
    export(load_encoder(path) if encoder is None else encoder, output, format, about)
    return output


def export(encoder: Encoder, path: Path, format: str, provenance: Provenance | None = None) -> None:
    """Convert an encoder for other programs.

    Args:
        encoder: The encoder.
        path: File or folder to write.
        format: A name in `FORMATS` or `FOLDERS`.
        provenance: Where the encoder comes from, for its metadata and its model card.

    Raises:
        UserError: The format is unknown or does not fit the encoder, or a library is missing.
    """
    if format not in FORMATS | FOLDERS:
        raise UserError(f"unknown format {format!r}; {did_you_mean(format, FORMATS | FOLDERS)}")
    if provenance:
        encoder.metadata = {**encoder.metadata, "provenance": dict(provenance)}
    if format in FORMATS:
        write_whole(path, FORMATS[format](encoder))
        return
    files = FOLDERS[format](encoder)
    if path.is_file():
        raise UserError(f"{path} is a file, and {format} is a folder of files; choose another --output")
    if (taken := next((name for name in files if (path / name).exists()), None)) and not is_ours(path):
        raise UserError(f"{path} has a {taken} that no export wrote; choose another --output")
    path.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_whole(path / name, content)


def provenance(run: Run, model: str = "") -> dict[str, Any]:
    """Describe where a run's encoder comes from: data, partition, method, protocols and results, without paths.

    Args:
        run: The run.
        model: Name of the model, if the run has several; by default the one in ``encoder.safetensors``.
    """
    folder = read_folder(run.folder)
    models = folder.results.get("by_model", {})
    own = models.get(model or folder.results.get("model"), folder.results)
    results = {key: value for key, value in own.items() if "/" in key and not isinstance(value, list)}
    supervised = folder.results.get("supervised")
    if supervised is None:  # a run of 0.1, whose method is imported to know
        supervised = recipe_of(run).composed.needs_labels
    return {
        "method": str(folder.results.get("method", "")),
        "supervised": bool(supervised),
        "setting": without_folders(folder.setting),
        "clients": len(folder.partition.get("clients", [])),
        "rounds": folder.rounds,
        "seed": folder.seed,
        "recipe_sha256": recipe_digest(folder.recipe_text),
        "split": str(folder.results.get("split", "")),
        "results": results,
        "trained_with": f"Atoll {folder.results.get('version', '')}",
        "exported_with": f"Atoll {version()}",
    }


def _example(encoder: Encoder) -> tuple[Tensor, ...]:
    about = input_metadata(encoder)
    return (torch.zeros(2, about["channels"], about["image_size"], about["image_size"]),)


def _about(encoder: Encoder) -> str:
    return json.dumps(encoder.metadata, sort_keys=True)


def _pt2(encoder: Encoder) -> bytes:
    batch = {0: torch.export.Dim("batch", min=1)}
    try:
        program = torch.export.export(encoder.eval(), _example(encoder), dynamic_shapes=(batch,))
    except torch._dynamo.exc.UserError as error:
        reason = first_line(error)
        raise UserError(f"torch.export cannot convert this encoder ({reason}); {_REMEDY}") from error
    file = io.BytesIO()
    torch.export.save(program, file, extra_files={EXTRA: _about(encoder)})
    return file.getvalue()


def _onnx(encoder: Encoder) -> bytes:
    require("onnxscript", "onnx", "the format ONNX")
    batch = {0: torch.export.Dim("batch", min=1)}
    program = torch.onnx.export(
        encoder.eval(),
        _example(encoder),
        dynamo=True,
        dynamic_shapes=(batch,),
        verbose=False,
        input_names=[INPUT],
        output_names=[OUTPUT],
    )
    assert program is not None  # noqa: S101
    shape = program.model.graph.inputs[0].shape
    if shape is not None and isinstance(shape[0], int):  # the exporter says nothing
        raise UserError(f"ONNX would hold this encoder for batches of two images alone; {_REMEDY}")
    program.model.metadata_props[KEY] = _about(encoder)
    return bytes(program.model_proto.SerializeToString())


FORMATS: dict[str, Callable[[Encoder], bytes]] = {"onnx": _onnx, "pt2": _pt2, "safetensors": library_bytes}
