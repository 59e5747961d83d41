"""Arrays as images: every type of numbers, and files that lie about themselves."""

import io

import numpy as np
import pytest

from atoll.data.decode import CorruptImageError, Decoding, decode


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["i1", ">i2", "i4", "u4", "i8", "u8", "f2", "f4", "f8"])
@pytest.mark.parametrize("channels", [1, 3])
def test_arrays_of_any_type_of_numbers_keep_their_values(kind, channels):
    values = (
        np.array([[-3, 0, 100], [7, 50, 12], [1, 2, 3]]) if kind[-2] != "u" else np.arange(9).reshape(3, 3)
    )
    array = values.astype(kind) if channels == 1 else np.stack([values.astype(kind)] * 3, -1)
    expected = np.rint((values + 3) * (255 / 103)).astype(np.uint8)
    pixels = decode(npy(array), Decoding(3, channels, window_low=-3, window_high=100))
    assert np.array_equal(pixels, [expected] * channels)


def test_arrays_of_other_numbers_are_a_clause():
    for array, words in (
        (np.full((2, 2), 2**40), "numbers of more than 32 bits"),
        (np.full((2, 2), 2**31 + 5, np.uint32), "numbers of more than 32 bits"),
        (np.zeros((2, 2), np.complex64), "an array of complex64"),
    ):
        with pytest.raises(CorruptImageError, match=f"{words}.*store uint8, uint16 or floats"):
            decode(npy(array), Decoding(2, 1))
    with pytest.raises(CorruptImageError, match=r"has 3 channels, and the encoder reads data.channels = 1"):
        decode(npy(np.zeros((2, 2, 3), np.uint16)), Decoding(2, 1))


def test_an_array_file_that_claims_more_than_it_holds_is_not_allocated():
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        out, {"descr": "|u1", "fortran_order": False, "shape": (10**9, 10**9)}
    )
    with pytest.raises(CorruptImageError, match=r"array of shape \(1000000000, 1000000000\), and holds less"):
        decode(out.getvalue(), Decoding(8, 1))


def test_no_object_is_read_from_an_array_file(tmp_path):
    np.save(tmp_path / "a.npy", np.array([{}], object), allow_pickle=True)
    with pytest.raises(CorruptImageError, match="allow_pickle=False"):
        decode((tmp_path / "a.npy").read_bytes(), Decoding(8, 1))
