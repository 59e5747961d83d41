"""``atoll embed``: computes and writes the representations of images."""

from __future__ import annotations

import csv
import io
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from atoll.core.config import build
from atoll.core.devices import check_device, find_device, repeat_results
from atoll.core.errors import UserError, warn
from atoll.core.files import read_bytes, refuse_special, write_whole
from atoll.core.outputs import check_output
from atoll.core.process_state import standard_settings
from atoll.data.decode import Decoding, decode_batch
from atoll.data.folders import IMAGE_SUFFIXES, files_below, is_image
from atoll.data.images import StoredPixels
from atoll.data.objects import give_data
from atoll.evaluation.embed import embed, input_views
from atoll.models import Encoder
from atoll.models.encoder import input_metadata
from atoll.models.exported import ProgramEncoder

BATCH = 256
OnCorrupt = Literal["refuse", "skip"]


def decoding_of(encoder: Encoder) -> Decoding:
    """Decoding of image files for an encoder, from its metadata."""
    about = input_metadata(encoder)
    # The files of older versions contain only the size.
    how = about.get("decoding", {"image_size": about["image_size"]})
    return replace(build(Decoding, how, "decoding in the encoder's file"), channels=about["channels"])


def use_device(encoder: Encoder, name: str) -> None:
    """Move an encoder to a device, with the choice of its kernels made (see `repeat_results`).

    Programs of other formats compute on the CPU, where they were exported.

    Args:
        encoder: The encoder.
        name: ``"cpu"``, ``"cuda"``, ``"cuda:1"``…, or ``"auto"`` (a GPU if there is one).

    Raises:
        UserError: The name is none of these, or requires a GPU that is not there or that a program cannot use.
    """
    check_device(name, "--device")
    if isinstance(encoder, ProgramEncoder):
        if name != "auto" and torch.device(name).type != "cpu":
            raise UserError(
                f"--device is {name}, and a .pt2 or .onnx file computes on the CPU; leave it out, or give the run "
                "or its encoder.safetensors"
            )
        return
    device = find_device(name, "--device")
    repeat_results(device)
    encoder.to(device)


def embed_images(
    encoder: Encoder, images: Path, on_corrupt: OnCorrupt = "refuse", device: str = "auto"
) -> tuple[list[str], Tensor]:
    """Compute the representations of an image file, or of all images below a folder.

    Args:
        encoder: The encoder, which is moved to the device.
        images: The file or folder.
        on_corrupt: If an image cannot be decoded, ``"refuse"`` all or ``"skip"`` it with a warning.
        device: The device that computes, as for `use_device`.

    Shape:
        - Output: names in UTF-8, and (N, d) float32 on the CPU

    Raises:
        UserError: The path does not exist, there are no images, an image cannot be decoded, or the encoder cannot
            compute on the device.
    """
    how = decoding_of(encoder)
    views = input_views(encoder, how.image_size)
    names: list[str] = []
    rows = []
    with standard_settings():
        use_device(encoder, device)
        for some, pixels in image_batches(encoder, images, on_corrupt):
            names += some
            rows.append(embed(encoder, views.plain, StoredPixels(pixels)))
    if not rows:
        raise UserError(f"no image of {images} can be read as the encoder's training images were")
    return _as_text(names), torch.cat(rows).cpu()


def embed_given(encoder: Encoder, images: object, device: str = "auto") -> Tensor:
    """Compute the representations of images that Python code gives.

    Args:
        encoder: The encoder, which is moved to the device.
        images: A dataset, an array or pairs of images and labels, as `atoll.simulate` takes them.
        device: The device that computes, as for `use_device`.

    Shape:
        - Output: (N, d) float32 on the CPU

    Raises:
        UserError: They are not images, one cannot be decoded, or the encoder cannot compute on the device.
    """
    how = decoding_of(encoder)
    shape, channels = tuple(getattr(images, "shape", ())), how.channels
    if len(shape) == 3 and (shape[-1] in (1, 3) or shape[0] == channels > 1):
        raise UserError(f"an array of shape {shape} may be one image; give it as images[None]")
    if images is None:
        raise UserError("the images are None; give a file, a folder, an array or a dataset")
    records = give_data(images).value[0].records
    views = input_views(encoder, how.image_size)
    rows = []
    with standard_settings():
        use_device(encoder, device)
        for start in range(0, len(records), BATCH):
            decoded = decode_batch(records.read(range(start, min(start + BATCH, len(records)))), how)
            for row, reason in decoded.corrupt.items():
                raise UserError(
                    f"image {start + row} cannot be read as the encoder's training images were: {reason}"
                )
            rows.append(embed(encoder, views.plain, StoredPixels(torch.from_numpy(decoded.pixels))))
    return torch.cat(rows).cpu()


def image_batches(
    encoder: Encoder, images: Path, on_corrupt: OnCorrupt | None = None
) -> Iterator[tuple[list[str], Tensor]]:
    """Decode an image file, or all images below a folder, as an encoder's training images were.

    Args:
        encoder: The encoder.
        images: The file or folder.
        on_corrupt: As for `embed_images`; None to refuse all, if the caller cannot leave images out.

    Shape:
        - Each batch: n names, which may hold bytes that are no text, and uint8 (n, C, H, W)

    Raises:
        UserError: The path does not exist, there are no images, or an image cannot be decoded.
    """
    if not images.exists():
        raise UserError(f"there is no file or folder {images}")
    paths = [images] if images.is_file() else sorted(p for p in files_below(images) if is_image(p.name))
    if not paths:
        raise UserError(f"{images} holds no image files ({', '.join(sorted(IMAGE_SUFFIXES))})")
    how = decoding_of(encoder)
    for start in range(0, len(paths), BATCH):
        some = paths[start : start + BATCH]
        decoded = decode_batch([read_bytes(refuse_special(path)) for path in some], how)
        for row, reason in decoded.corrupt.items():
            if not is_image(some[row].name):
                raise UserError(
                    f"{images} is no image file; give one ({', '.join(sorted(IMAGE_SUFFIXES))}) or a folder of them"
                )
            what = f"{some[row]} cannot be read as the encoder's training images were: {reason}"
            if on_corrupt != "skip":
                or_skip = "; atoll embed can also leave it out (--on-corrupt skip)" if on_corrupt else ""
                raise UserError(
                    f"{what}; convert it to a common format with 8 or 16 bits, or remove it{or_skip}"
                )
            warn(f"{what}; it is left out")
        kept = [row for row in range(len(some)) if row not in decoded.corrupt]
        names = [str(some[row].relative_to(images)) if images.is_dir() else some[row].name for row in kept]
        if kept:
            yield names, torch.from_numpy(decoded.pixels[kept])


def _as_text(names: list[str]) -> list[str]:
    r"""Names of files as UTF-8: unchanged, but for bytes that are no text, which become ``\xe9``.

    Raises:
        UserError: Two files would have one name.
    """
    texts = [os.fsencode(name).decode("utf-8", "backslashreplace") for name in names]
    if len(set(texts)) < len(texts):
        twin = next(text for text, count in Counter(texts).items() if count > 1)
        raise UserError(
            f"two files would both be called {twin}, as one of the names is not UTF-8; rename that one"
        )
    return texts


def save_embeddings(path: Path, names: list[str], h: Tensor) -> None:
    """Write representations as ``.npz``, ``.csv`` or ``.parquet``.

    Raises:
        UserError: See `check_embeddings`, or the file cannot be written.
    """
    check_embeddings(path)
    write_whole(path, _WRITERS[path.suffix](names, h))


def check_embeddings(path: Path) -> None:
    """Refuse a file of embeddings with another suffix, or in a run's own folders.

    Raises:
        UserError: The suffix is unknown, or the file belongs to a run.
    """
    check_output(path)
    if path.suffix not in _WRITERS:
        raise UserError(f"cannot write embeddings to {path}; its suffix must be one of {', '.join(_WRITERS)}")


def _npz(names: list[str], h: Tensor) -> bytes:
    file = io.BytesIO()
    np.savez(file, names=np.array(names), embeddings=h.cpu().numpy())
    return file.getvalue()


def _csv(names: list[str], h: Tensor) -> bytes:
    file = io.BytesIO()
    lines = io.TextIOWrapper(file, "utf-8", newline="")
    # By default, Python 3.11 does not quote a carriage return.
    writer = csv.writer(lines, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
    writer.writerow(["name", *(f"h{i}" for i in range(h.shape[1]))])
    for name, row in zip(names, h.cpu(), strict=True):  # all as Python numbers take eight times the memory
        writer.writerow([name, *row.tolist()])
    lines.detach()
    return file.getvalue()


def _parquet(names: list[str], h: Tensor) -> bytes:
    values = pa.FixedSizeListArray.from_arrays(pa.array(h.cpu().numpy().reshape(-1)), h.shape[1])
    file = pa.BufferOutputStream()
    pq.write_table(pa.table({"name": names, "embedding": values}), file)
    return bytes(file.getvalue())


_WRITERS: dict[str, Callable[[list[str], Tensor], bytes]] = {
    ".npz": _npz,
    ".csv": _csv,
    ".parquet": _parquet,
}
