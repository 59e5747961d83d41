"""CSV files that list images: labels, clients and splits come out as they were written."""

import csv

import numpy as np
import pytest
import torch
from PIL import Image

from atoll.core.errors import UserError
from atoll.data.options import DataOptions
from atoll.data.sources import load_data

CLASSES, HOSPITALS = ("cat", "NA", "null"), ("north", "süd")


def rows(count=12, first=0):
    return [
        {
            "id": number,
            "file": f"photos/{number}.png",
            "label": CLASSES[number % 3],
            "hospital": HOSPITALS[number % 2],
            "age": 20 + number,
        }
        for number in range(first, first + count)
    ]


def write(path, entries, delimiter=",", encoding="utf-8", columns=None):
    """Write the CSV file and its images, whose only grey value is 10 times their number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding=encoding) as file:
        writer = csv.DictWriter(file, columns or list(entries[0]), delimiter=delimiter, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(entries)
    for entry in entries:
        image = path.parent / entry["file"]
        image.parent.mkdir(exist_ok=True)
        Image.new("L", (8, 8), 10 * entry["id"]).save(image)
    return path


def load(path, **options):
    return load_data(
        DataOptions(
            source="csv", path=str(path), image_size=8, channels=1, **{"test_fraction": 0, **options}
        ),
        0,
    )


def contents(images):
    """The images' numbers, with the names of their classes."""
    numbers = images.images.gather(torch.arange(len(images)))[:, 0, 0, 0] // 10
    return [
        (int(number), images.classes[label]) for number, label in zip(numbers, images.labels, strict=True)
    ]


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_each_image_has_the_label_and_the_columns_of_its_row(tmp_path, delimiter, encoding):
    file = write(tmp_path / "list.csv", rows(), delimiter, encoding)
    train = load(file, natural_column="hospital").train
    assert contents(train) == [(row["id"], row["label"]) for row in rows()]
    assert train.columns["age"].tolist() == [row["age"] for row in rows()]
    names = train.column_values["hospital"]
    assert [names[code] for code in train.columns["hospital"]] == [row["hospital"] for row in rows()]


def test_a_folder_has_a_file_for_each_split_or_one_file(tmp_path):
    train, test = rows(), rows(3, first=12)
    both = tmp_path / "both"
    write(both / "train.csv", train)
    write(both / "test.csv", test)
    apart = tmp_path / "apart"  # as Hugging Face's image folders
    write(apart / "train/metadata.csv", train)
    write(apart / "val/metadata.csv", test)
    for folder in (both, apart):
        splits = load(folder)
        assert contents(splits.train) == [(row["id"], row["label"]) for row in train]
        assert contents(splits.test) == [(row["id"], row["label"]) for row in test]
    one = write(tmp_path / "one/labels.tsv", train, "\t").parent
    assert contents(load(one).train) == [(row["id"], row["label"]) for row in train]
    with pytest.raises(UserError, match=r"no CSV file of the split 'dev'; set data\.test_split"):
        load(both, test_split="dev")
    with pytest.raises(
        UserError, match=r"no CSV file of the split 'all' \(files there: test.csv, train.csv\)"
    ):
        load(both, train_split="all")


def test_a_column_may_say_the_split(tmp_path):
    split = ["train", "test", "val"] * 4
    file = write(
        tmp_path / "list.csv", [row | {"split": name} for row, name in zip(rows(), split, strict=True)]
    )
    for test, options in (("test", {}), ("val", {"test_split": "val"})):
        splits = load(file, **options)
        expected = {
            name: [(row["id"], row["label"]) for row, at in zip(rows(), split, strict=True) if at == name]
            for name in ("train", test)
        }
        assert contents(splits.train) == expected["train"]
        assert contents(splits.test) == expected[test]
    for options, option in (({"train_split": "Train"}, "train_split"), ({"test_split": "x"}, "test_split")):
        with pytest.raises(UserError, match=rf"column 'split' holds 'test', 'train', 'val'.*data\.{option}$"):
            load(file, **options)
    plain = write(tmp_path / "plain.csv", rows())
    with pytest.raises(
        UserError, match=r"no text column 'split', so it holds no split 'val'; leave data\.test_split"
    ):
        load(plain, test_split="val")
    numbers = [row | {"split": row["id"] % 5} for row in rows()]  # folds, which are a column as any other
    assert load(write(tmp_path / "folds.csv", numbers)).train.columns["split"].tolist() == [
        row["split"] for row in numbers
    ]


@pytest.mark.parametrize("place", ["train.csv", "list.csv"])
def test_training_images_alone_lend_their_share_for_testing(tmp_path, place):
    entries = [row | {"split": "train"} for row in rows()]
    path = write(tmp_path / "photos" / place, entries)
    splits = load(path.parent if place == "train.csv" else path, test_fraction=0.25)
    assert (len(splits.train), len(splits.test)) == (9, 3)
    assert sorted(contents(splits.train) + contents(splits.test)) == [
        (row["id"], row["label"]) for row in entries
    ]


def test_the_image_and_label_columns_may_be_named(tmp_path):
    Image.new("L", (8, 8)).save(tmp_path / "thumb.png")
    entries = [row | {"thumb": "thumb.png", "finding": row["age"] % 2} for row in rows()]
    file = write(tmp_path / "list.csv", entries, columns=["thumb", *rows()[0], "finding"])
    train = load(file, image_column="file", label_column="finding").train
    assert contents(train) == [(row["id"], str(row["age"] % 2)) for row in entries]
    assert (load(file).train.images.gather(torch.arange(12)) == 0).all()  # the first column with a file


def test_absolute_names_and_no_labels(tmp_path):
    write(tmp_path / "images/list.csv", rows())
    absolute = [row | {"file": str(tmp_path / "images" / row["file"])} for row in rows()]
    file = tmp_path / "elsewhere.csv"
    with file.open("w", newline="", encoding="utf-8") as text:
        writer = csv.DictWriter(text, ["file", "age"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(absolute)
    train = load(file).train
    assert train.labels is None
    assert (train.images.gather(torch.arange(12))[:, 0, 0, 0].numpy() == 10 * np.arange(12)).all()


def test_the_fingerprint_follows_labels_and_images(tmp_path):
    entries = rows()
    prints = [load(write(tmp_path / "a/list.csv", entries)).train.fingerprint]
    prints.append(load(write(tmp_path / "b/list.csv", entries)).train.fingerprint)
    assert prints[0] == prints[1]  # the same content elsewhere
    prints.append(
        load(write(tmp_path / "c/list.csv", [entries[0] | {"label": "dog"}, *entries[1:]])).train.fingerprint
    )
    file = write(tmp_path / "d/list.csv", entries)
    Image.new("L", (8, 8), 255).save(tmp_path / "d" / entries[0]["file"])
    prints.append(load(file).train.fingerprint)
    assert len(set(prints)) == 3


@pytest.mark.parametrize(
    ("change", "options", "reason"),
    [
        (
            {"file": "photos/none.png"},
            {},
            r"lists 1 of 12 images that do not exist: photos/none\.png; .*relative to",
        ),
        (
            {"file": ""},
            {"image_column": "file"},
            r"column 'file' is empty in row 2, counted from 1 below the row of names \(1 such row\); name an image",
        ),
        ({"label": ""}, {}, r"column 'label' is empty for photos/1\.png \(1 such row\); give"),
        ({}, {"label_column": "lable"}, r"no column 'lable' \(data.label_column\); did you mean 'label'"),
        (
            {},
            {"image_column": "age"},
            "column 'age' does not hold names of image files; set data.image_column",
        ),
        ({}, {"natural_column": "site"}, r"no column 'site' \(data.natural_column\)"),
    ],
)
def test_what_is_missing_is_said(tmp_path, change, options, reason):
    entries = rows()
    file = write(tmp_path / "list.csv", entries)
    entries[1] |= change
    text = file.read_text(encoding="utf-8").splitlines()
    text[2] = ",".join(str(value) for value in entries[1].values())
    file.write_text("\n".join(text), encoding="utf-8")
    with pytest.raises(UserError, match=reason):
        load(file, **options)


def test_files_that_are_no_lists_of_images_are_refused(tmp_path):
    file = tmp_path / "list.csv"
    for content, reason in (
        (
            b"a,b\n1,x\n",
            r"no column names image files relative to .* \(columns: a, b\); set data\.image_column",
        ),
        (b"a,b\n", "has no row below the row of names; add one for each image"),
        (b"", "is not a readable CSV file"),
        (b"a,b\n1,2,3\n", "is not a readable CSV file"),
        (b"a,b,a\nx,y,z\n", "several columns called 'a'; rename them"),
        (b"a,b\n" + 300 * b"x" + b",y\n", "no column names image files"),
        ("file,label\nä.png,x\n".encode("utf-16"), "is not in UTF-8; save it"),
        ("file,label\nä.png,x\n".encode("latin-1"), "is not in UTF-8; save it"),
    ):
        file.write_bytes(content)
        with pytest.raises(UserError, match=reason):
            load(file)
