"""DICOM files that pydicom writes, against the window of the DICOM standard, value by value."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from atoll.core.errors import UserError
from atoll.data import dicom
from atoll.data.decode import CorruptImageError, Decoding, decode, decode_stored
from atoll.data.sources import DataOptions, load_data

pydicom = pytest.importorskip("pydicom", reason="the extra atoll[dicom] is not installed")
from pydicom.dataset import FileMetaDataset  # noqa: E402
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian  # noqa: E402

VALUES = np.array([[-1024, -160, 39], [40, 41, 3071]], np.int16)


def file_of(stored: np.ndarray, **tags: Any) -> bytes:
    """A DICOM file of 16 bits and one frame."""
    file = pydicom.Dataset()
    file.file_meta = FileMetaDataset()
    file.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    file.file_meta.MediaStorageSOPClassUID = file.SOPClassUID = CTImageStorage
    file.file_meta.MediaStorageSOPInstanceUID = file.SOPInstanceUID = "1.2.3"
    file.Rows, file.Columns = stored.shape[:2]
    file.SamplesPerPixel, file.PhotometricInterpretation = 1, "MONOCHROME2"
    file.BitsAllocated = file.BitsStored = 8 * stored.itemsize
    file.HighBit = file.BitsStored - 1
    file.PixelRepresentation = int(np.issubdtype(stored.dtype, np.signedinteger))
    file.PixelData = stored.tobytes()
    for name, value in tags.items():
        setattr(file, name, value)
    out = io.BytesIO()
    file.save_as(out, enforce_file_format=True)
    return out.getvalue()


def by_the_standard(x: float, c: float, w: float) -> float:
    """PS3.3, C.11.2.1.2.1, with y from 0 to 255."""
    if x <= c - 0.5 - (w - 1) / 2:
        return 0.0
    if x > c - 0.5 + (w - 1) / 2:
        return 255.0
    return ((x - (c - 0.5)) / (w - 1) + 0.5) * 255


@pytest.mark.parametrize(("slope", "intercept"), [(1, 0), (2, -1024), (0.5, 100)])
@pytest.mark.parametrize("kind", ["MONOCHROME1", "MONOCHROME2"])
@pytest.mark.parametrize(("centre", "width"), [(40, 400), (40, 4), (40.5, 3)])
def test_grey_values_follow_the_standard(
    slope: float, intercept: float, kind: str, centre: float, width: float
) -> None:
    tags = {
        "RescaleSlope": slope,
        "RescaleIntercept": intercept,
        "WindowCenter": centre,
        "WindowWidth": width,
    }
    stored = np.concatenate([VALUES.reshape(-1), np.arange(-3, 4) + int((centre - intercept) / slope)])[None]
    data = file_of(stored.astype(np.int16), PhotometricInterpretation=kind, **tags)
    expected = [[by_the_standard(slope * x + intercept, centre, width) for x in stored[0].tolist()]]
    shades = np.array(expected) if kind == "MONOCHROME2" else 255 - np.array(expected)
    np.testing.assert_allclose(decode_stored(data, 1)[0], shades, rtol=0, atol=0.5 + 1e-9)  # rounded
    assert (decode_stored(data, 3) == decode_stored(data, 1)).all()


@pytest.mark.parametrize("groups", ["SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence"])
@pytest.mark.parametrize(
    "how", [Decoding(channels=1), Decoding(channels=1, window_low=-160, window_high=240)]
)
def test_an_enhanced_object_says_its_values_by_frame(groups: str, how: Decoding) -> None:
    """As enhanced CT and MR do: a file of one frame that says the same by itself is the oracle."""
    rescaling = {"RescaleSlope": 2, "RescaleIntercept": -1024}
    window = {"WindowCenter": 40, "WindowWidth": 400}
    frames = []
    for about in ((rescaling, window), ({"RescaleSlope": 1, "RescaleIntercept": 0}, {})):
        frames.append(pydicom.Dataset())
        for macro, tags in zip(
            ("PixelValueTransformationSequence", "FrameVOILUTSequence"), about, strict=True
        ):
            item = pydicom.Dataset()
            for name, value in tags.items():
                setattr(item, name, value)
            setattr(frames[-1], macro, [item])
    stored = np.arange(0, 1024, dtype=np.int16).reshape(32, 32)
    if groups.startswith("Shared"):
        frames = frames[:1]
    enhanced = file_of(
        np.stack([stored, stored[::-1]]), Rows=32, Columns=32, NumberOfFrames=2, **{groups: frames}
    )
    assert (decode(enhanced, how) == decode(file_of(stored, **rescaling, **window), how)).all()


def table_of(entries: list[int], first: int, bits: int, **tags: Any) -> Any:
    """A sequence of one table (LUT), for values of 16 bits with a sign."""
    item = pydicom.Dataset()
    item.add_new("LUTDescriptor", "SS" if first < 0 else "US", [len(entries), first, bits])
    item.add_new("LUTData", "US", entries)
    for name, value in tags.items():
        setattr(item, name, value)
    return pydicom.Sequence([item])


@pytest.mark.parametrize("kind", ["MONOCHROME1", "MONOCHROME2"])
@pytest.mark.parametrize(("bits", "length"), [(8, 300), (12, 300), (16, 256)])
def test_a_table_shows_what_it_says_and_its_ends_beyond(kind: str, bits: int, length: int) -> None:
    top, first = 2**bits - 1, 1000
    entries = [round(top * (i / (length - 1)) ** 2) for i in range(length)]
    stored = np.array([[0, 999, 1000, 1001], [1150, 1000 + length - 1, 1000 + length, 4000]], np.uint16)
    table = table_of(entries, first, bits, LUTExplanation="a square")
    window = {"WindowCenter": 5, "WindowWidth": 3}  # the table has precedence
    data = file_of(stored, VOILUTSequence=table, PhotometricInterpretation=kind, **window)
    places = [[min(max(int(x) - first, 0), length - 1) for x in row] for row in stored]
    shades = np.array([[255 * entries[place] / top for place in row] for row in places])
    expected = shades if kind == "MONOCHROME2" else 255 - shades
    np.testing.assert_allclose(decode_stored(data, 1)[0], expected, rtol=0, atol=0.5 + 1e-9)
    own = decode(data, Decoding(2, 1, window_low=0, window_high=4000))
    plain = file_of(stored, PhotometricInterpretation=kind)
    assert own.tolist() == decode(plain, Decoding(2, 1, window_low=0, window_high=4000)).tolist()


def test_a_table_in_words_of_bytes_is_that_in_numbers() -> None:
    stored, entries = np.array([[0, 1], [2, 3]], np.uint16), [0, 1000, 300, 65535]
    packed = table_of(entries, 0, 16)
    packed[0].add_new("LUTData", "OW", np.array(entries, "<u2").tobytes())
    found = decode_stored(file_of(stored, VOILUTSequence=packed), 1)
    assert found[0].tolist() == [[0, 4], [1, 255]]  # 255 · entry / 65535


def test_a_modality_table_comes_before_the_window() -> None:
    stored = np.array([[0, 1], [2, 3]], np.uint16)
    modality = table_of([10, 40, 90, 160], 0, 16, ModalityLUTType="OD")
    data = file_of(stored, ModalityLUTSequence=modality, WindowCenter=85.5, WindowWidth=151)
    assert decode_stored(data, 1)[0].tolist() == [[0, 51], [136, 255]]  # 255 · (x − 10) / 150


def test_a_sigmoid_window_follows_the_standard() -> None:
    window = {"WindowCenter": 40, "WindowWidth": 100, "VOILUTFunction": "SIGMOID"}
    expected = 255 / (1 + np.exp(-4 * (VALUES.astype(float) - 40) / 100))
    found = decode_stored(file_of(VALUES, **window), 1)[0]
    np.testing.assert_allclose(found, expected, rtol=0, atol=0.5 + 1e-9)


def test_a_damaged_table_makes_a_file_corrupt() -> None:
    data = file_of(VALUES, VOILUTSequence=table_of([], 0, 16))
    with pytest.raises(CorruptImageError, match="cannot be read"):
        decode_stored(data, 1)


def test_a_width_of_an_exact_window_has_no_half_pixels() -> None:
    data = file_of(VALUES, WindowCenter=40, WindowWidth=2, VOILUTFunction="LINEAR_EXACT")
    assert decode_stored(data, 1).tolist() == [[[0, 0, 0], [128, 255, 255]]]


def test_the_first_of_several_windows_and_frames_is_read() -> None:
    several = file_of(VALUES, WindowCenter=[40, 600], WindowWidth=[400, 2800])
    one = file_of(VALUES, WindowCenter=40, WindowWidth=400)
    assert (decode_stored(several, 1) == decode_stored(one, 1)).all()
    frames = file_of(np.stack([VALUES, VALUES[::-1]]), Rows=2, Columns=3, NumberOfFrames=2)
    assert (decode_stored(frames, 1) == decode_stored(file_of(VALUES), 1)).all()


def test_the_recipe_has_precedence_and_a_file_without_a_window_has_its_range() -> None:
    square = VALUES[:, :2]
    data = file_of(square, WindowCenter=40, WindowWidth=400)
    own = decode(file_of(square), Decoding(2, 1))
    assert own.tolist() == decode(data, Decoding(2, 1, window="per-image")).tolist()
    assert (own.min(), own.max()) == (0, 255)
    set_by_recipe = decode(data, Decoding(2, 1, window_low=-160, window_high=840))
    assert set_by_recipe.tolist() == [[[0, 0], [51, 51]]]


def test_colour_is_as_it_is() -> None:
    colour = np.random.default_rng(0).integers(0, 256, (4, 4, 3), np.uint8)
    data = file_of(colour, SamplesPerPixel=3, PhotometricInterpretation="RGB", PlanarConfiguration=0)
    assert (decode(data, Decoding(4, 3)) == colour.transpose(2, 0, 1)).all()
    palette = file_of(colour[..., 0], PhotometricInterpretation="PALETTE COLOR")
    with pytest.raises(CorruptImageError, match=r"^it is a DICOM file with PALETTE COLOR pixels of uint8"):
        decode(palette, Decoding(4, 3))


def test_more_pixels_than_pillow_opens_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2)
    with pytest.raises(CorruptImageError, match="more pixels than are safe"):
        decode(file_of(VALUES), Decoding(2, 1))


@pytest.mark.parametrize("end", [140, 300, -4])
def test_a_damaged_file_is_corrupt(end: int) -> None:
    with pytest.raises(CorruptImageError, match=r"^it is a DICOM file that cannot be read"):
        decode(file_of(VALUES)[:end], Decoding(2, 1))


def test_a_folder_of_scans_says_the_values_that_it_found(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        tags = {"WindowCenter": 40, "WindowWidth": 400} if name == "a" else {}
        (tmp_path / name / "1.dcm").write_bytes(file_of(VALUES[:, :2], **tags))
    Image.fromarray(np.zeros((2, 2), np.uint8)).save(tmp_path / "a/2.png")
    options = DataOptions(source="folder", path=str(tmp_path), image_size=2, channels=1, test_fraction=0)
    said = (
        r"values from -1024 to 41; each DICOM file's own window is used, or its range; to map all alike, set"
    )
    with pytest.warns(UserWarning, match=said):
        images = load_data(options, 0).train
    assert images.classes == ["a", "b"]
    assert images.images.shape == (3, 1, 2, 2)
    own = DataOptions(**{**vars(options), "window_low": -1024.0, "window_high": 41.0})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_data(own, 0)


def test_without_pydicom_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*arguments: object) -> None:
        raise UserError("a DICOM file needs pydicom; install it")

    data = file_of(VALUES)
    monkeypatch.setattr(dicom, "require", missing)
    with pytest.raises(UserError, match="needs pydicom; install it"):
        decode(data, Decoding(2, 1))
