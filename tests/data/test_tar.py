"""Shards that tarfile writes, against the same images in folders; and every way to cut one off."""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
from pathlib import Path

import numpy as np
import pytest

from atoll.core.errors import UserError
from atoll.data.options import DataOptions
from atoll.data.sources import Splits, load_data
from tests.data.test_sources import pixels_of

HOW = {"image_size": 8, "channels": 1, "test_fraction": 0.0}


def load(path: Path, source: str = "tar", **options: object) -> Splits:
    return load_data(DataOptions(source, str(path), **{**HOW, **options}), 0)


def shard(path: Path, members: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


@pytest.fixture
def samples(digits, encode_png):
    """The first digits as members of a shard."""

    def make(first: int, last: int) -> dict[str, bytes]:
        images, labels = digits
        found = {}
        for i in range(first, last):
            found |= {f"{i:03}.png": encode_png(images[i]), f"{i:03}.cls": str(labels[i]).encode()}
        return found

    return make


@pytest.mark.parametrize("memory", [8.0, 1e-9])
def test_shards_are_their_images_in_order_with_labels(samples, digits, tmp_path, memory):
    shard(tmp_path / "b.tar", samples(30, 60))
    shard(tmp_path / "a.tar", samples(0, 30))
    images = load(tmp_path, memory_gib=memory).train
    assert np.array_equal(pixels_of(images), digits[0])
    assert [images.classes[label] for label in images.labels] == [str(label) for label in digits[1]]
    assert images.classes == [str(label) for label in range(10)]
    again = load(tmp_path / "a.tar", memory_gib=memory).train
    assert np.array_equal(pixels_of(again), digits[0][:30])


@pytest.mark.parametrize(
    "place", ["train-00.tar, test-00.tar", "some_train_0.tar, some_val_0.tar", "train/0.tar, test/0.tar"]
)
def test_splits_are_words_of_names_or_folders(samples, digits, tmp_path, place):
    train, test = place.split(", ")
    shard(tmp_path / train, samples(0, 20))
    shard(tmp_path / test, samples(20, 30))
    splits = load(tmp_path)
    assert np.array_equal(pixels_of(splits.train), digits[0][:20])
    assert np.array_equal(pixels_of(splits.test), digits[0][20:30])


@pytest.mark.parametrize("place", ["Train-0.tar, Test-0.tar", "training/0.tar, testing/0.tar"])
def test_shards_of_splits_with_other_names_are_told(samples, tmp_path, place):
    files = train, test = place.split(", ")
    shard(tmp_path / train, samples(0, 20))
    shard(tmp_path / test, samples(20, 30))
    told = f"no .tar file of the split 'train', so all are read as one split; if {test}, {train} belong"
    with pytest.warns(UserWarning, match=told):
        assert len(load(tmp_path, test_fraction=0).train) == 30
    words = [re.split("[-/]", file)[0] for file in files]
    splits = load(tmp_path, train_split=words[0], test_split=words[1])  # as it says, and not told
    assert (len(splits.train), len(splits.test)) == (20, 10)


def test_labels_and_clients_of_json(samples, tmp_path):
    members = {}
    for name, data in samples(0, 4).items():
        about = {"label": "odd", "kind": int(name[:3]) % 2, "site": "north" if name < "002" else "south"}
        members |= (
            {f"some/{name[:3]}.json": json.dumps(about).encode()}
            if name.endswith("cls")
            else {f"some/{name}": data}
        )
    path = shard(tmp_path / "a.tar", members)
    images = load(path, label_column="kind", natural_column="site").train
    assert (images.labels.tolist(), images.classes) == ([0, 1, 0, 1], ["0", "1"])
    assert (images.columns["site"].tolist(), images.column_values["site"]) == (
        [0, 0, 1, 1],
        ["north", "south"],
    )
    assert load(path).train.classes == ["odd"]
    assert load(path, labels=False).train.labels is None
    with pytest.raises(UserError, match=r"no image has a 'place' in KEY\.json"):
        load(path, natural_column="place")
    with pytest.raises(UserError, match=r"no image has a 'sort' in KEY\.json"):
        load(path, label_column="sort")


def test_classes_that_are_numbers_are_in_their_order_also_as_json(samples, tmp_path):
    members = {**samples(0, 2), "000.cls": b"10", "001.json": b"9"}
    del members["001.cls"]
    images = load(shard(tmp_path / "a.tar", members)).train
    assert ([images.classes[label] for label in images.labels], images.classes) == (["10", "9"], ["9", "10"])


def test_what_is_no_image_is_passed_over(samples, digits, tmp_path):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        tar.addfile(tarfile.TarInfo("folder"))
        for name, data in {**samples(0, 3), "._000.png": b"resource fork", "000.txt": b"words"}.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        link = tarfile.TarInfo("009.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    assert np.array_equal(pixels_of(load(path).train), digits[0][:3])


def test_a_shard_that_is_cut_off_anywhere_is_refused_by_name(samples, tmp_path):
    whole = shard(tmp_path / "a.tar", samples(0, 3)).read_bytes()
    end = len(whole.rstrip(b"\0"))
    end += -end % 512  # where the end mark begins, after the last digit of the last label
    cut = tmp_path / "cut.tar"
    for length in [*range(1, end + 1, 100), end]:
        cut.write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"cut\.tar (is damaged|is cut off|is not a readable tar file)"):
            load(cut)
    cut.write_bytes(whole[: end + 512])
    assert len(load(cut).train) == 3


def test_a_damaged_header_is_not_taken_for_the_end(samples, tmp_path):
    path = shard(tmp_path / "a.tar", samples(0, 3))
    data = bytearray(path.read_bytes())
    at = data.index(b"001.png")
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"a\.tar is damaged after 000\.cls, or more was appended"):
        load(path)


def test_a_damaged_image_is_named_with_its_shard(samples, tmp_path):
    path = shard(tmp_path / "a.tar", {**samples(0, 3), "001.png": b"no image"})
    with pytest.raises(
        UserError, match=r"1 of 3 images cannot be decoded: 001\.png of a\.tar \(it is damaged"
    ):
        load(path)
    with pytest.warns(UserWarning, match=r"skipped 1 of 3 images"):
        assert len(load(path, on_corrupt="skip").train) == 2


WRONG = {
    r"a\.tar has no label, which others have": {"001.cls": None},
    r"a\.tar: 001 has several images, \.png and \.jpg": {"001.jpg": b"?"},
    r"a\.tar: 001\.json cannot be read": {"001.json": b"{"},
    r"label is \[1\]; it must be an integer or text": {"001.json": b'{"label": [1]}', "001.cls": None},
    r"a\.tar holds 001\.PNG twice; keep one": {"001.PNG": b"?"},
    r"001\.json has 2000000 bytes, too many": {"001.json": b" " * 2_000_000},
}


@pytest.mark.parametrize("sentence", WRONG)
def test_what_is_wrong_with_a_sample_is_said(samples, tmp_path, sentence):
    members = {**samples(0, 3), **WRONG[sentence]}
    path = shard(tmp_path / "a.tar", {name: data for name, data in members.items() if data is not None})
    with pytest.raises(UserError, match=sentence):
        load(path)


def test_what_is_wrong_with_a_folder_or_file_is_said(samples, tmp_path):
    with pytest.raises(UserError, match=r"holds no \.tar files"):
        load(tmp_path)
    path = shard(tmp_path / "a.tar", samples(0, 3))
    with pytest.raises(UserError, match=r"no \.tar file of the split 'other'; set data.train_split"):
        load(tmp_path, train_split="other")
    with pytest.raises(UserError, match="one file and holds no split 'val'"):
        load(path, test_split="val")
    twice = tmp_path / "twice.tar"
    twice.write_bytes(path.read_bytes() * 2)
    with pytest.raises(UserError, match=r"twice\.tar is damaged after 002\.cls, or more was appended"):
        load(twice)
    with tarfile.open(tmp_path / "small.tar", "w:gz") as tar:
        tar.add(path, "a.png")
    with pytest.raises(UserError, match=r"small\.tar is not a readable tar file without compression"):
        load(tmp_path / "small.tar")
    empty = shard(tmp_path / "empty.tar", {"a.txt": b"words"})
    with pytest.raises(UserError, match=r"empty\.tar holds no images \(.*\)$"):
        load(empty)
    dotted = shard(tmp_path / "dotted.tar", {"a.txt": b"words", "x/img.v1.00.JPG": b"an image"})
    with pytest.raises(
        UserError, match=r"no images .*first dot of a name, so x/img\.v1\.00\.jpg is not taken"
    ):
        load(dotted)


@pytest.mark.parametrize("source", ["tar", "parquet", "images"])
def test_a_pipe_among_the_files_is_named_and_never_waited_for(tmp_path, source):
    name = {"tar": "train.tar", "parquet": "train.parquet", "images": "image.png"}[source]
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match=f"{name} is a pipe, a socket or a device"):
        load(tmp_path, source)


def test_a_shard_of_two_splits_is_refused(samples, tmp_path):
    shard(tmp_path / "train-val-000000.tar", samples(0, 4))
    told = r"train-val-000000\.tar belongs to the training split and to the test split by its name"
    with pytest.raises(UserError, match=told):
        load(tmp_path)


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_sparse_image_is_refused_not_read_from_the_wrong_place(digits, encode_png, tmp_path, form):
    image = encode_png(digits[0][0])
    info = tarfile.TarInfo("GNUSparseFile.0/a.png")
    if form == tarfile.GNU_FORMAT:
        data, info.type = image, tarfile.GNUTYPE_SPARSE
    else:  # a map of the file's one part is before it, which GNU tar's manual describes as version 1.0
        data = f"1\n0\n{len(image)}\n".encode().ljust(tarfile.BLOCKSIZE, b"\0") + image
        about = {"major": "1", "minor": "0", "name": "a.png", "realsize": str(len(image))}
        info.pax_headers = {f"GNU.sparse.{key}": value for key, value in about.items()}
    info.size = len(data)
    with tarfile.open(tmp_path / "a.tar", "w", format=form) as tar:
        tar.addfile(info, io.BytesIO(data))
    with pytest.raises(UserError, match=r"a\.png as a sparse file; write it without tar's --sparse"):
        load(tmp_path / "a.tar")
