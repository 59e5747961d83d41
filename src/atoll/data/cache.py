"""Cache of decoded images: each source is decoded once, and all processes map the same file.

``$ATOLL_CACHE`` (by default ``~/.cache/atoll``) contains, for every fingerprint, the pixels as ``.npy`` and a
``.json`` with their checksum and the images that could not be decoded. Both are written atomically. Everything in
the folder can be deleted at any time; missing or damaged files are created again.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from torch import Tensor, from_numpy

from atoll.core.digests import JSON, open_text, seal_text
from atoll.core.errors import UserError
from atoll.core.files import cache_folder, clear_parts, hash_bytes, whole_file, write_whole
from atoll.data.decode import Decoding, Values, decode_batch
from atoll.data.images import Pixels, Shape, StoredPixels
from atoll.data.records import Records

_BATCH = 512  # images in memory while decoding
_FORMAT = 1  # part of every fingerprint; runs recognise their images by it
_DECODER = 3  # part of each entry; increase it if decoding gives other pixels, to decode images again


@dataclass(frozen=True)
class Opened:
    """Decoded images of records.

    Attributes:
        pixels: One image per record; all zeros for a corrupt image.
        corrupt: Reasons why images cannot be decoded, by row.
        fingerprint: Hash of the content and the decoding.
        brightest: Largest value of a pixel.
        values: Values of the images with more than 8 bits, before the window; None if there are none.
    """

    pixels: Pixels
    corrupt: dict[int, str]
    fingerprint: str
    brightest: int
    values: Values | None


@dataclass
class _Notes:
    """Contents of the ``.json`` file of an entry: the checksum of the pixels, and the corrupt rows.

    Attributes:
        checksum: Checksum of the ``.npy`` file; None if the pixels are streamed.
        corrupt: Reasons why images cannot be decoded, by row.
        brightest: Largest value of a pixel.
        values: Values of the images with more than 8 bits.
        decoder: Version of the decoder.
    """

    checksum: int | None
    corrupt: dict[int, str] = field(default_factory=dict)
    brightest: int = 0
    values: Values | None = None
    decoder: int = _DECODER


@dataclass(frozen=True)
class StreamedPixels:
    """Pixels that are decoded on demand; only one batch is in memory at a time.

    Attributes:
        records: The encoded images.
        how: How to decode them.
    """

    records: Records
    how: Decoding

    @property
    def shape(self) -> Shape:
        """(N, C, H, W)."""
        return (len(self.records), *self.how.shape)

    def __len__(self) -> int:
        return len(self.records)

    def gather(self, indices: Tensor) -> Tensor:
        """See `atoll.data.images.Pixels.gather`.

        Raises:
            UserError: An image can no longer be decoded, because the source has changed during the run.
            IndexError: An index is outside 0..N-1.
        """
        rows = indices.numpy().astype(np.int64)
        if ((rows < 0) | (rows >= len(self))).any():
            raise IndexError(f"indices must be in 0..{len(self) - 1}")
        images = np.empty((len(rows), *self.how.shape), dtype=np.uint8)
        for start in range(0, len(rows), _BATCH):
            batch = rows[start : start + _BATCH]
            decoded = decode_batch(self.records.read(batch), self.how)
            images[start : start + len(batch)] = decoded.pixels
            # Callers never request corrupt images, so this one was intact when the source was opened.
            for position, reason in decoded.corrupt.items():
                name = self.records.describe(int(batch[position]))
                raise UserError(f"{name} can no longer be decoded ({reason}); has the source changed?")
        return from_numpy(images)


def open_records(records: Records, how: Decoding, memory_bytes: int) -> Opened:
    """Decode records into the cache, or open the cached pixels; stream them if they exceed `memory_bytes`.

    In both cases, every image is decoded once, so that corrupt images are known before the first round.

    Args:
        records: The encoded images.
        how: How to decode them.
        memory_bytes: Maximum size of the decoded images; larger ones are streamed.

    Raises:
        UserError: A source file cannot be read, or the cache cannot be written.
    """
    fingerprint = hash_bytes(json.dumps([_FORMAT, records.digest(), asdict(how)]).encode())
    shape = (len(records), *how.shape)
    stored, notes = cache_folder() / f"{fingerprint}.npy", cache_folder() / f"{fingerprint}.json"
    known = _read_notes(notes)
    if known is not None and known.corrupt and _can_be_decoded_now(records, how, known.corrupt):
        known = None
    if math.prod(shape) > memory_bytes:
        if known is None:
            known = _Notes(None)
            for _ in _decoded(records, how, known):
                pass
            _write_notes(notes, known)
        pixels: Pixels = StreamedPixels(records, how)
    else:
        if known is None or not _intact(stored, shape, known.checksum):
            clear_parts(cache_folder())
            known = _build(stored, records, how, shape)
            _write_notes(notes, known)
        pixels = StoredPixels.open(stored)
    return Opened(pixels, known.corrupt, fingerprint, known.brightest, known.values)


def _can_be_decoded_now(records: Records, how: Decoding, corrupt: Collection[int]) -> bool:
    """Whether a corrupt image can be decoded now, with a new codec or a higher limit."""
    rows = np.array(sorted(corrupt), dtype=np.int64)
    parts = (rows[start : start + _BATCH] for start in range(0, len(rows), _BATCH))
    return any(len(decode_batch(records.read(part), how).corrupt) < len(part) for part in parts)


def _decoded(
    records: Records, how: Decoding, notes: _Notes
) -> Iterator[np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]:
    """Decode records batch by batch, and record the corrupt ones and the values."""
    for start in range(0, len(records), _BATCH):
        rows = np.arange(start, min(start + _BATCH, len(records)))
        batch = decode_batch(records.read(rows), how)
        notes.corrupt.update({start + position: reason for position, reason in batch.corrupt.items()})
        notes.brightest = max(notes.brightest, int(batch.pixels.max()))
        notes.values = batch.values.joined(notes.values) if batch.values else notes.values
        yield batch.pixels


def _build(path: Path, records: Records, how: Decoding, shape: Shape) -> _Notes:
    notes = _Notes(0)
    with whole_file(path, shared=True) as file:
        header = {"descr": "|u1", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        for pixels in _decoded(records, how, notes):
            # Written, not mapped: a full disk then causes an error here instead of a bus error later.
            data = pixels.tobytes()
            file.write(data)
            notes.checksum = zlib.crc32(data, notes.checksum or 0)
    return notes


def _intact(path: Path, shape: Shape, checksum: int | None) -> bool:
    """Whether the file is complete. This reads the whole file, which training would do next anyway."""
    try:
        pixels = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError):
        return False
    return pixels.shape == shape and pixels.dtype == np.uint8 and zlib.crc32(pixels) == checksum


def _write_notes(path: Path, notes: _Notes) -> None:
    write_whole(path, seal_text(json.dumps(asdict(notes)).encode(), JSON), shared=True)


def _read_notes(path: Path) -> _Notes | None:
    try:
        text, verified = open_text(path.read_bytes(), JSON)
        if not verified:
            return None
        notes = json.loads(text)
        if notes.get("decoder") != _DECODER:
            return None
        corrupt = {int(row): str(why) for row, why in notes["corrupt"].items()}
        values = notes["values"]
        return _Notes(notes["checksum"], corrupt, int(notes["brightest"]), values and Values(**values))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # missing or damaged: created again
