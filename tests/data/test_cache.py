"""The cache: decoded once, whole or not at all, remade when damaged, and streaming with the same bits."""

import errno
import json
import os
import pickle
import resource
from dataclasses import replace

import numpy as np
import pytest
import torch

from atoll.core.digests import JSON, open_text, seal_text
from atoll.core.errors import UserError
from atoll.core.files import content_digest, whole_file
from atoll.data import cache as cache_module
from atoll.data.cache import open_records
from atoll.data.decode import Decoding
from atoll.data.records import FileRecords, SelectedRecords

HOW = Decoding(8, 1)
PLENTY = 2**30


@pytest.fixture
def records(tmp_path, digits, encode_png):
    root = tmp_path / "images"
    root.mkdir()
    for i, pixels in enumerate(digits[0]):
        (root / f"{i:02}.png").write_bytes(encode_png(pixels))
    return FileRecords(root, tuple(sorted(path.name for path in root.iterdir())))


def everything(opened):
    return opened.pixels.gather(torch.arange(len(opened.pixels)))


def count_decoding(monkeypatch):
    decoded = []

    def counting(encoded, how, original=cache_module.decode_batch):
        decoded.append(len(encoded))
        return original(encoded, how)

    monkeypatch.setattr(cache_module, "decode_batch", counting)
    return decoded


def test_decodes_once_and_keeps_every_pixel(records, digits, monkeypatch):
    decoded = count_decoding(monkeypatch)
    first = open_records(records, HOW, PLENTY)
    again = open_records(records, HOW, PLENTY)
    assert sum(decoded) == 60
    assert first.fingerprint == again.fingerprint
    assert np.array_equal(everything(again).numpy()[:, 0], digits[0])


def test_no_flipped_bit_of_the_notes_is_used(records, cache, monkeypatch):
    opened = open_records(records, HOW, PLENTY)
    (notes,) = cache.glob("*.json")
    whole = notes.read_bytes()
    decoded = count_decoding(monkeypatch)
    for byte in range(0, len(whole), 7):
        notes.write_bytes(whole[:byte] + bytes([whole[byte] ^ 4]) + whole[byte + 1 :])
        assert open_records(records, HOW, PLENTY).corrupt == opened.corrupt
    assert sum(decoded) == 60 * len(range(0, len(whole), 7))
    assert notes.read_bytes() == whole


def test_what_an_earlier_version_decoded_is_decoded_again_under_its_fingerprint(records, cache, monkeypatch):
    """It may have misread images; a run on them can be resumed."""
    opened = open_records(records, HOW, PLENTY)
    (path,) = cache.glob("*.json")
    notes = json.loads(open_text(path.read_bytes(), JSON)[0])
    decoded = count_decoding(monkeypatch)
    for earlier in ({"decoder": notes.pop("decoder") - 1}, {}):
        path.write_bytes(seal_text(json.dumps(notes | earlier).encode(), JSON))
        assert open_records(records, HOW, PLENTY).fingerprint == opened.fingerprint
    assert sum(decoded) == 2 * 60


def test_other_decoding_is_another_entry(records):
    prints = {open_records(records, how, PLENTY).fingerprint for how in (HOW, Decoding(8, 3), Decoding(6, 1))}
    assert len(prints) == 3


def test_the_fingerprint_is_of_content_and_not_of_place_or_time(records, tmp_path):
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    for name in records.names:
        (copy / name).write_bytes((records.root / name).read_bytes())
    moved = FileRecords(copy, records.names)
    before = open_records(records, HOW, PLENTY).fingerprint
    assert open_records(moved, HOW, PLENTY).fingerprint == before
    data = (copy / "00.png").read_bytes()
    (copy / "00.png").write_bytes(data[:40] + bytes([data[40] ^ 1]) + data[41:])  # as long as before
    assert open_records(moved, HOW, PLENTY).fingerprint != before


def test_selections_of_one_size_are_entries_of_their_own(records, digits):
    for rows in ([1, 2, 3], [1, 2, 4]):
        chosen = open_records(SelectedRecords(records, np.array(rows)), HOW, PLENTY)
        assert np.array_equal(everything(chosen).numpy()[:, 0], digits[0][rows])


def test_too_large_streams_with_the_same_bits(records, cache, monkeypatch):
    monkeypatch.setattr(cache_module, "_BATCH", 16)
    stored, streamed = (open_records(records, HOW, memory) for memory in (60 * 64, 60 * 64 - 1))
    assert type(streamed.pixels) is not type(stored.pixels)
    indices = torch.tensor([59, 0, 17, 17, 3])
    for pixels in (streamed.pixels, pickle.loads(pickle.dumps(streamed.pixels))):
        assert torch.equal(pixels.gather(indices), stored.pixels.gather(indices))
    assert torch.equal(everything(streamed), everything(stored))
    assert (stored.pixels.shape, stored.fingerprint) == (streamed.pixels.shape, streamed.fingerprint)
    assert streamed.pixels.gather(torch.tensor([], dtype=torch.int64)).shape == (0, 1, 8, 8)
    with pytest.raises(IndexError):
        streamed.pixels.gather(torch.tensor([-1]))


def test_streaming_holds_a_bounded_number_of_images_and_looks_through_once(records, cache, monkeypatch):
    monkeypatch.setattr(cache_module, "_BATCH", 16)
    decoded = count_decoding(monkeypatch)
    open_records(records, HOW, 1)
    assert (sum(decoded), max(decoded)) == (60, 16)
    everything(open_records(records, HOW, 1))
    assert (sum(decoded), max(decoded)) == (120, 16)
    assert not list(cache.glob("*.npy"))


def test_what_was_streamed_can_be_stored_later(records):
    streamed = open_records(records, HOW, 1)
    assert torch.equal(everything(open_records(records, HOW, PLENTY)), everything(streamed))


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[-77] ^= 4
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("suffix", ["npy", "json"])
@pytest.mark.parametrize("harm", [truncate, flip_a_bit, os.unlink, lambda path: path.write_bytes(b"")])
def test_a_damaged_cache_is_remade(records, cache, digits, suffix, harm):
    open_records(records, HOW, PLENTY)
    (entry,) = cache.glob(f"*.{suffix}")
    if suffix == "json" and harm is flip_a_bit:
        entry.write_text(entry.read_text().replace('"checksum": ', '"checksum": 1'))
    else:
        harm(entry)
    assert np.array_equal(everything(open_records(records, HOW, PLENTY)).numpy()[:, 0], digits[0])


def test_corrupt_images_are_known_whichever_way_they_are_read(records):
    (records.root / "07.png").write_bytes(b"hello")
    stored, streamed = open_records(records, HOW, PLENTY), open_records(records, HOW, 1)
    again = open_records(records, HOW, PLENTY)
    assert list(stored.corrupt) == list(streamed.corrupt) == list(again.corrupt) == [7]


def test_a_source_that_changes_under_a_streaming_run_is_named(records):
    pixels = open_records(records, HOW, 1).pixels
    (records.root / "07.png").write_bytes(b"hello")
    with pytest.raises(UserError, match=r"07\.png can no longer be decoded"):
        pixels.gather(torch.tensor([6, 7]))
    (records.root / "07.png").unlink()
    with pytest.raises(UserError, match=r"cannot read .*07\.png"):
        pixels.gather(torch.tensor([7]))


def left_over(cache):
    return [path for path in cache.rglob("*") if path.suffix in (".npy", ".part")]


def test_a_full_disk_gets_a_sentence_and_leaves_nothing(records, cache):
    content_digest([(name, records.root / name) for name in records.names])  # small enough for any disk
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # the kernel then refuses to write on
    try:
        with pytest.raises(UserError, match=r"cannot write .*; point ATOLL_CACHE at another folder"):
            open_records(records, HOW, PLENTY)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert left_over(cache) == []


def test_no_space_is_called_by_its_name(tmp_path):
    def write():
        with whole_file(tmp_path / "sub" / "file") as file:
            file.write(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UserError, match="the disk is full"):
        write()
    assert list((tmp_path / "sub").iterdir()) == []


def test_an_interrupted_build_leaves_nothing(records, cache, monkeypatch):
    decode, calls = cache_module.decode_batch, []

    def interrupted(*arguments):
        if calls:
            raise KeyboardInterrupt
        calls.append(arguments)
        return decode(*arguments)

    monkeypatch.setattr(cache_module, "_BATCH", 25)
    monkeypatch.setattr(cache_module, "decode_batch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        open_records(records, HOW, PLENTY)
    assert left_over(cache) == []


def test_a_cache_that_cannot_be_made_gets_a_sentence(records, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ATOLL_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match="ATOLL_CACHE"):
        open_records(records, HOW, PLENTY)


def test_an_image_counts_as_corrupt_no_longer_than_it_is(records, digits, monkeypatch):
    decoded = []

    def lacking_a_codec(encoded, how, original=cache_module.decode_batch):
        decoded.append(len(encoded))
        batch = original(encoded, how)
        return replace(batch, corrupt={0: "a codec is missing"}, pixels=np.zeros_like(batch.pixels))

    with monkeypatch.context() as without:
        without.setattr(cache_module, "decode_batch", lacking_a_codec)
        assert set(open_records(records, HOW, PLENTY).corrupt) == {0}
        assert set(open_records(records, HOW, PLENTY).corrupt) == {0}
    assert decoded == [60, 1]  # of the second time, only the corrupt image
    opened = open_records(records, HOW, PLENTY)
    assert opened.corrupt == {}
    assert np.array_equal(everything(opened)[:, 0].numpy(), digits[0])


def test_a_file_that_changed_within_its_old_time_is_read_again(tmp_path):
    path = tmp_path / "0.npy"
    found = set()
    for content in (b"before", b"after!"):
        path.write_bytes(content)
        os.utime(path, ns=(10**18, 10**18))  # as an archive that is unpacked sets it
        found.add(content_digest([("0.npy", path)]))
    assert len(found) == 2
