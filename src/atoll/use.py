"""What to do with a finished encoder: measure it again, embed images with it, hand it to other programs."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.torch
import torch
from torch import Tensor

from atoll.data.decode import Decoding, decode_batch
from atoll.data.files import read_bytes
from atoll.data.folders import is_image
from atoll.data.options import DataOptions
from atoll.data.sources import load_data
from atoll.data.view_options import ViewOptions
from atoll.data.views import Views, make_views
from atoll.errors import UserError, did_you_mean
from atoll.evaluation import embed, evaluate, mean_over_clients
from atoll.launch import held_out, model_path, partition_of
from atoll.models import Encoder, load_encoder
from atoll.options import describe
from atoll.recipe import load_recipe
from atoll.runs import Run
from atoll.tree import write_whole

BATCH = 256


def find_encoder(run_or_encoder: Path | str) -> Path:
    """The encoder's file of a run's folder, or the file itself.

    Raises:
        UserError: there is none, or the run has not finished.
    """
    path = Path(run_or_encoder)
    if not path.is_dir():
        return path
    run = Run(path).require()
    if not run.encoder_path.is_file():
        raise UserError(
            f"{path} has no finished encoder yet; finish it with: atoll run … --out {path} --resume"
        )
    return run.encoder_path


def evaluate_run(run: Run, protocol: str, settings: Sequence[str] = ()) -> dict[str, Any]:
    """Measure a finished run under a named protocol, and keep the result beside it.

    Args:
        run: finished.
        protocol: its name.
        settings: ``data.KEY=value``, for other images than the recipe's.

    Returns:
        What `measure_run` gives, less the numbers of each of several models: those are in the file.

    Raises:
        UserError: see `measure_run`; or another setting; or the file cannot be written.
    """
    other = next((text for text in settings if not text.startswith("data.")), None)
    if other is not None:
        raise UserError(
            f"--set {other}: a finished run is measured as its recipe says, on other data.… at most"
        )
    data = load_recipe(run.recipe_path, settings).data if settings else None
    results = {"protocol": protocol, **measure_run(run, [protocol], data)}
    if data:
        results["data"] = describe(data)
    run.write(f"evaluation-{protocol}.json", json.dumps(results) + "\n")
    return {key: value for key, value in results.items() if key != "by_model"}


def measure_run(run: Run, protocols: Sequence[str], data: DataOptions | None = None) -> dict[str, Any]:
    """A finished run's encoder, or encoders, under named protocols.

    Args:
        run: finished.
        protocols: their names.
        data: other images than those it learnt from: kNN and probes learn from their training part.

    Returns:
        The ``"split"`` that was measured on, and what `atoll.evaluation.evaluate` gives; where the run ended
        with several models their mean, as `atoll.evaluation.mean_over_clients` makes it.

    Raises:
        UserError: the run has not finished, a protocol is unknown, the images have not the labels, or not the
            held-out part, that it needs, or the recipe's are no longer those that the clients held.
    """
    paths, clients = _models(run)
    recipe = load_recipe(run.recipe_path)
    splits = load_data(data or recipe.data, recipe.seed)
    partition = partition_of(run)
    if data is None and partition and partition.fingerprint != splits.train.fingerprint:
        raise UserError(
            f"the clients of {run.folder} held other images than its recipe's data give here; put those back, or "
            "name images to measure it on: --set data.source=folder data.path=…"
        )
    data = data or recipe.data
    split, images = held_out(splits)
    views = make_views(recipe.views, data.image_size, data.channels)
    client_ids = partition.client_ids(splits.train) if partition else None
    device = recipe.engine.find_device()
    by_model = {
        name: evaluate(
            load_encoder(path).to(device),
            splits.train,
            images,
            views,
            recipe.evaluation,
            seed=recipe.seed,
            protocols=protocols,
            client_ids=client_ids,
            strict=True,
        )
        for name, path in paths.items()
    }
    return {"split": split, **mean_over_clients(by_model, clients)}


def _models(run: Run) -> tuple[dict[str, Path], dict[str, int]]:
    """A finished run's encoders by the names of their models, and how many clients use each."""
    only = find_encoder(run.folder)
    clients: dict[str, int] = (run.read_json("evaluation.json") or {}).get("clients_by_model", {})
    return {name: model_path(run, name) for name in clients} or {"": only}, clients


def decoding_of(encoder: Encoder) -> Decoding:
    """How image files are decoded for an encoder, as its file says."""
    about = encoder.metadata
    how = about.get(
        "decoding", {"image_size": about["image_size"]}
    )  # files of older versions say only the size
    return Decoding(channels=about["channels"], **how)


def views_of(encoder: Encoder) -> Views:
    """Makes an encoder's inputs of decoded images, as its file says."""
    about = encoder.metadata
    size, mean, std = about["image_size"], tuple(about["mean"]), tuple(about["std"])
    options = ViewOptions(preset="none", size=size, mean=mean, std=std)
    return make_views(options, decoding_of(encoder).image_size, about["channels"])


def embed_images(encoder: Encoder, images: Path) -> tuple[list[str], Tensor]:
    """Representations of an image file, or of all images below a folder.

    Shape:
        - Output: names, and (N, d) float32

    Raises:
        UserError: no such file, no images, or one that cannot be decoded.
    """
    if not images.exists():
        raise UserError(f"there is no file or folder {images}")
    found = (path for path in images.rglob("*") if is_image(path.name) and path.is_file())
    paths = [images] if images.is_file() else sorted(found)
    if not paths:
        raise UserError(f"{images} holds no images")
    views = views_of(encoder)
    how = decoding_of(encoder)
    rows = []
    for begin in range(0, len(paths), BATCH):
        some = paths[begin : begin + BATCH]
        pixels, corrupt = decode_batch([read_bytes(path) for path in some], how)
        if corrupt:
            row, reason = next(iter(corrupt.items()))
            raise UserError(
                f"{some[row]} cannot be read as the encoder's training images were: {reason}; save it anew as a "
                "common image of 8 or 16 bits, or leave it out"
            )
        rows.append(embed(encoder, views.plain, _Held(torch.from_numpy(pixels))))
    names = [str(path.relative_to(images)) if images.is_dir() else path.name for path in paths]
    return names, torch.cat(rows)


def save_embeddings(path: Path, names: list[str], h: Tensor) -> None:
    """Write representations as ``.npz``, ``.csv`` or ``.parquet``.

    Raises:
        UserError: another ending, or a file that cannot be written.
    """
    writers: dict[str, Callable[[list[str], Tensor], bytes]] = {
        ".npz": _npz,
        ".csv": _csv,
        ".parquet": _parquet,
    }
    if path.suffix not in writers:
        raise UserError(f"embeddings are written as {', '.join(writers)}, and {path} ends otherwise")
    write_whole(path, writers[path.suffix](names, h))


def export(encoder: Encoder, path: Path, format: str) -> None:
    """Hand an encoder to other programs.

    Args:
        encoder: to export.
        path: file to write.
        format: a name in `FORMATS`.

    Raises:
        UserError: an unknown format, or a library that is missing.
    """
    if format not in FORMATS:
        raise UserError(f"unknown format {format!r}; {did_you_mean(format, FORMATS)}")
    write_whole(path, FORMATS[format](encoder))


class _Held:
    """Pixels that are in memory already."""

    def __init__(self, data: Tensor) -> None:
        self._data = data
        self.shape: tuple[int, int, int, int] = (data.shape[0], data.shape[1], data.shape[2], data.shape[3])

    def __len__(self) -> int:
        return len(self._data)

    def gather(self, indices: Tensor) -> Tensor:
        return self._data[indices]


def _npz(names: list[str], h: Tensor) -> bytes:
    file = io.BytesIO()
    np.savez(file, names=np.array(names), embeddings=h.cpu().numpy())
    return file.getvalue()


def _csv(names: list[str], h: Tensor) -> bytes:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["name", *(f"h{i}" for i in range(h.shape[1]))])
    writer.writerows(
        [name, *(repr(value) for value in row)] for name, row in zip(names, h.tolist(), strict=True)
    )
    return file.getvalue().encode()


def _parquet(names: list[str], h: Tensor) -> bytes:
    values = pa.FixedSizeListArray.from_arrays(pa.array(h.cpu().numpy().reshape(-1)), h.shape[1])
    file = pa.BufferOutputStream()
    pq.write_table(pa.table({"name": names, "embedding": values}), file)
    return bytes(file.getvalue())


def _weights(encoder: Encoder) -> bytes:
    state = {
        name: tensor.detach().cpu().contiguous() for name, tensor in sorted(encoder.state_dict().items())
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
    try:
        import onnxscript  # type: ignore[import-not-found, import-untyped, unused-ignore]  # noqa: F401
    except ImportError:
        raise UserError("ONNX needs two more libraries: pip install onnx onnxscript") from None
    batch = {0: torch.export.Dim("batch", min=1)}
    program = torch.onnx.export(
        encoder.eval(), _example(encoder), dynamo=True, dynamic_shapes=(batch,), verbose=False
    )
    assert program is not None  # noqa: S101
    return bytes(program.model_proto.SerializeToString())


FORMATS: dict[str, Callable[[Encoder], bytes]] = {"onnx": _onnx, "pt2": _pt2, "safetensors": _weights}
