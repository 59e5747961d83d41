"""Images of DICOM files, read by pydicom."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from atoll.core.extras import require
from atoll.core.text import error_words
from atoll.data.arrays import TOO_LARGE, most_pixels

_GREY = ("MONOCHROME1", "MONOCHROME2")
_PREAMBLE = 128  # bytes before the mark DICM


class DicomError(Exception):
    """Error for a DICOM file that cannot be read; the message is a clause that begins with "it"."""


@dataclass(frozen=True)
class Scan:
    """A grey image of a DICOM file.

    Attributes:
        values: (H, W), after the file's rescale slope and intercept: Hounsfield units for computed tomography.
        window: The values that become black and white, by the file's window centre and width; None if it has none.
        shown: (H, W), from 0 for black to 1 for white, by the file's table of grey values (VOI LUT) or its sigmoid
            window; None if it has neither.
        inverted: Whether large values are dark (MONOCHROME1).
    """

    values: NDArray[np.float64]
    window: tuple[float, float] | None
    shown: NDArray[np.float64] | None
    inverted: bool


def is_dicom(encoded: bytes) -> bool:
    """Whether bytes are a DICOM file, by its mark.

    Example:
        >>> from atoll.data.dicom import is_dicom
        >>> is_dicom(bytes(128) + b"DICM"), is_dicom(b"GIF89a")
        (True, False)
    """
    return encoded[_PREAMBLE : _PREAMBLE + 4] == b"DICM"


def read_dicom(encoded: bytes) -> Scan | Image.Image:
    """Read the first frame of a DICOM file: a grey one with its window, a colour one as it is.

    Raises:
        UserError: pydicom is not installed.
        DicomError: The file is damaged, or its pixels are in a form that is not read.
    """
    pydicom = require("pydicom", "dicom", "a DICOM file")
    pixels = require("pydicom.pixels", "dicom", "a DICOM file")
    try:
        file = pydicom.dcmread(io.BytesIO(encoded))
        kind = str(file.PhotometricInterpretation)
        if int(file.Rows) * int(file.Columns) > most_pixels():
            raise DicomError(TOO_LARGE)
        stored = pixels.pixel_array(file, index=0)
        if kind not in _GREY:
            return _colour(stored, kind)
        _say_of_first_frame(file)
        values = pixels.apply_modality_lut(stored, file).astype(np.float64)
        return Scan(values, _window(file), _shown(values, file), kind == "MONOCHROME1")
    except DicomError:
        raise
    except Exception as error:  # pydicom and its decoders raise any exception on damaged files
        raise DicomError(f"it is a DICOM file that cannot be read ({error_words(error)})") from error


def _say_of_first_frame(file: Any) -> None:
    """Copy the first frame's rescaling and window to the file, if it has them per frame, as in enhanced objects.

    Reference:
        DICOM PS3.3, C.7.6.16: the frame's own groups and those that all frames share.
    """
    for groups in ("SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence"):
        for group in (file.get(groups) or [])[:1]:
            for macro in ("PixelValueTransformationSequence", "FrameVOILUTSequence"):
                for said in (group.get(macro) or [])[:1]:
                    file.update(said)


def _colour(stored: NDArray[Any], kind: str) -> Image.Image:
    if stored.ndim != 3 or stored.dtype != np.uint8 or not kind.startswith(("RGB", "YBR")):
        raise DicomError(f"it is a DICOM file with {kind} pixels of {stored.dtype}, which are not read")
    return Image.fromarray(stored)  # pydicom has converted it to RGB


def _shown(values: NDArray[np.float64], file: Any) -> NDArray[np.float64] | None:
    """Grey values by the first table of a file, or by its sigmoid window: DICOM PS3.3, C.11.2.1.1 and C.11.2.1.3.1.

    pydicom's `apply_voi` is not used: tables of 8 bits with more than 256 entries wrap around in it.
    """
    if file.get("VOILUTSequence"):
        item = file.VOILUTSequence[0]
        count, first, bits = (int(number) for number in item.LUTDescriptor)
        data = item.LUTData
        if isinstance(data, bytes):
            order = "<" if file.file_meta.TransferSyntaxUID.is_little_endian else ">"
            data = np.frombuffer(data, f"{order}u2")
        table: NDArray[np.float64] = np.asarray(data, np.float64)[: count or 2**16] / (2**bits - 1)
        return table[np.rint(values - first).clip(0, len(table) - 1).astype(np.intp)]
    centre, width = _first(file.get("WindowCenter")), _first(file.get("WindowWidth"))
    if centre is None or not width or str(file.get("VOILUTFunction")) != "SIGMOID":
        return None
    # equals 1 / (1 + exp(-4 (x - c) / w)), which could overflow
    shown: NDArray[np.float64] = 0.5 + 0.5 * np.tanh(2 * (values - centre) / width)
    return shown


def _window(file: Any) -> tuple[float, float] | None:
    """The first window of a file; its ends by DICOM PS3.3, C.11.2.1.2 and C.11.2.1.3."""
    centre, width = _first(file.get("WindowCenter")), _first(file.get("WindowWidth"))
    exact = str(file.get("VOILUTFunction", "LINEAR")) == "LINEAR_EXACT"
    if centre is None or width is None or width <= (0 if exact else 1):
        return None
    if exact:
        return centre - width / 2, centre + width / 2
    return centre - 0.5 - (width - 1) / 2, centre - 0.5 + (width - 1) / 2


def _first(value: Any) -> float | None:
    if value is None or value == "":
        return None
    values = value if hasattr(value, "__iter__") and not isinstance(value, str) else [value]
    return next((float(one) for one in values), None)
