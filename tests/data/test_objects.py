"""Images that Python code gives: their forms, classes and clients, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import ExifTags, Image, ImageOps
from torch.utils.data import TensorDataset

import atoll
from atoll.core.config import describe
from atoll.core.errors import UserError
from atoll.data.items import image_bytes, to_image
from atoll.data.objects import give_data
from atoll.data.sources import DataOptions, load_data
from tests.data.given import LABELS, Named, Pairs, pixels, small
from tests.harness import tiny


class Table:
    """What atoll reads of a Hugging Face dataset."""

    column_names = ("image", "label")
    features: ClassVar = {"image": None, "label": type("ClassLabel", (), {"names": ["a", "b", "c"]})}

    def __len__(self) -> int:
        return 60

    def __getitem__(self, row: int) -> dict[str, object]:
        return {"image": Image.fromarray(pixels()[row]), "label": LABELS[row]}


class TableDict(dict[str, Table]):
    """What atoll reads of a Hugging Face dict of splits."""

    @property
    def column_names(self) -> dict[str, tuple[str, ...]]:
        return {name: table.column_names for name, table in self.items()}


class Stream:
    """What atoll reads of a Hugging Face dataset that is streamed."""

    column_names, features = Table.column_names, Table.features

    def __iter__(self) -> Iterator[dict[str, object]]:
        return map(Table().__getitem__, range(60))


def read(given: object) -> list[np.ndarray]:
    listing = give_data(given).value[0]
    return [np.asarray(image) for image in listing.records.read(np.arange(len(listing)))]


def test_every_form_of_the_same_images_is_the_same() -> None:
    images = pixels()
    channels_first = torch.from_numpy(images).permute(0, 3, 1, 2)
    forms = {
        "array": (images, LABELS),
        "tensor": (channels_first, torch.tensor(LABELS)),
        "floats": TensorDataset(channels_first / 255, torch.tensor(LABELS)),
        "own": Pairs(images, LABELS),
        "table": Table(),
        "dicts": [
            {"label": label, "img": image, "id": 7} for image, label in zip(images, LABELS, strict=True)
        ],
        "alone": images,
    }
    for form, source in forms.items():
        given = give_data(source)
        for ours, one in zip(read(source), images, strict=True):
            np.testing.assert_array_equal(ours, one, err_msg=form)
        if form != "alone":
            assert given.value[0].labels.tolist() == LABELS
    assert give_data(Table()).value[0].classes == ["a", "b", "c"]
    assert give_data(images).value[0].labels is None
    fingerprints = {str(give_data(source)).partition("#")[2] for source in list(forms.values())[:6]}
    assert len(fingerprints) == 1
    changed = images.copy()
    changed[59, 0, 0, 0] ^= 1
    assert str(give_data((changed, LABELS))) != str(give_data((images, LABELS)))
    assert str(give_data((images, LABELS[::-1]))) != str(give_data((images, LABELS)))


def test_images_that_differ_in_palette_or_orientation_alone_are_other_images() -> None:
    """They were decoded from the cache as the first of them."""
    indexed, rng = Image.new("P", (4, 4)), np.random.default_rng(0)
    indexed.frombytes(bytes(rng.integers(0, 4, 16, dtype=np.uint8)))
    photo = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
    pairs = []
    for step in (1, 20):
        coloured = indexed.copy()
        coloured.putpalette([step * value for value in range(12)])
        turned = photo.copy()
        turned.getexif()[ExifTags.Base.Orientation] = 1 if step == 1 else 6
        pairs.append((coloured, turned))
    for first, second in zip(*pairs, strict=True):
        names = [give_data([one] * 3) for one in (first, second)]
        assert names[0] != names[1]
        shown = [
            load_data(DataOptions("object", name, test_fraction=0, image_size=4), seed=0).train.images
            for name in names
        ]
        for one, image in zip(shown, (first, second), strict=True):
            expected = np.asarray(ImageOps.exif_transpose(image).convert("RGB")).transpose(2, 0, 1)
            assert np.array_equal(one.gather(torch.tensor([2]))[0].numpy(), expected)


def test_test_images_are_those_given_and_match_by_name(tmp_path: Path) -> None:
    images = pixels()
    train = Named(images[:40], LABELS[:40], ["cat", "dog", "owl"])
    test = Named(images[40:], [1 - label if label < 2 else 2 for label in LABELS[40:]], ["dog", "cat", "owl"])
    given = give_data(train, test)
    splits = load_data(DataOptions(source="object", path=given, image_size=8, test_fraction=0.5), seed=0)
    assert len(splits.train) == 40
    np.testing.assert_array_equal(
        splits.test.images.gather(torch.arange(20)).permute(0, 2, 3, 1).numpy(), images[40:]
    )
    assert splits.test.labels.tolist() == LABELS[40:]
    names = {str(give_data(train, other)) for other in (None, test, images[40:], images[41:])}
    assert len(names) == 4
    run = atoll.simulate(small(), tmp_path / "run", data=train, test_data=test)
    with pytest.raises(UserError, match="now says"):
        atoll.simulate(small(), run.folder, resume=True, data=train, test_data=train)
    with pytest.raises(UserError, match="test_data is given without data"):
        atoll.simulate(small(), tmp_path / "other", test_data=images)
    with pytest.raises(UserError, match=r"test_data\['north'\] has 2 images and 1 labels"):
        give_data(images, {"north": (images[:2], [1])})


@pytest.mark.parametrize("named", ["data", "test_data"])
def test_names_of_either_split_hold_for_numbers_in_the_other(named: str) -> None:
    """Such as a subset of CIFAR-10, which has no names, beside CIFAR-10's test set, which has."""
    names, images = ["cat", "dog", "owl"], pixels()
    plain, other = Pairs(images[:40], LABELS[:40]), Named(images[40:], [2, 0, 2] * 6 + [1, 1], names)
    train, test = give_data(*((other, plain) if named == "data" else (plain, other))).value
    assert train.classes == test.classes == names
    assert (train if named == "data" else test).labels.tolist() == other.labels
    assert (test if named == "data" else train).labels.tolist() == plain.labels


def test_splits_that_are_given_as_clients_are_warned_of() -> None:
    with pytest.warns(UserWarning, match="clients called 'train' and 'test'; if they are splits"):
        give_data({"train": pixels(3), "test": pixels(3)})


class Torn(Pairs):
    """A dataset of which an item cannot be read."""

    def __getitem__(self, row: int) -> tuple[np.ndarray, int]:
        if row == 2:
            raise OSError("a torn file")
        return super().__getitem__(row)


@pytest.mark.parametrize("name", ["target", "Class_ID", "y"])
def test_columns_that_may_hold_labels_are_named(name: str) -> None:
    with pytest.warns(
        UserWarning, match=rf"^data counts as unlabelled, .* fine_label; rename .* if it is {name}$"
    ):
        given = give_data([{"img": image, name: 1, "id": 2} for image in pixels(3)])
    assert given.value[0].labels is None
    for other in ({}, {"label": 1}, {"id": 2}):  # without a warning
        give_data([{"img": image, **other} for image in pixels(3)])


def test_whole_floats_are_classes_and_minus_one_is_no_label() -> None:
    images = pixels(4)
    whole = give_data((images, np.array([0.0, 2.0, 2.0, 0.0]))).value[0]
    assert (whole.classes, whole.labels.tolist()) == (["0", "2"], [0, 1, 1, 0])
    with pytest.warns(UserWarning, match="all labels of data are -1, so the images count as unlabelled"):
        unlabelled = give_data((images, [-1] * 4)).value[0]
    assert unlabelled.labels is None
    assert give_data((images, [-1, 1, 1, -1])).value[0].classes == ["-1", "1"]


def test_what_is_no_data_is_refused_in_one_sentence(tmp_path: Path) -> None:
    images = pixels(4)
    wrong = {
        "a dataset with a length": iter(images),
        r"^data is 'cats'; a path goes into the recipe \(data.source, data.path\), and images here$": "cats",
        "^data is 'dogs'; ": Path("dogs"),
        r"^data is the class Table; give an object of it, Table\(…\)$": Table,
        r"^data is a DataFrame; give its rows as a list of images and labels, list\(zip\(": pd.DataFrame(
            {"image": list(images), "label": range(4)}
        ),
        "^data is a Stream; give a dataset with a length": Stream(),
        (
            r"^data has the splits train, test; give one, such as data\['train'\], and the test images "
            "as test_data, or in a recipe set data.test_split$"
        ): TableDict(train=Table(), test=Table()),
        r"^data\['north'\] has the splits train; .* such as data\['north'\]\['train'\], and": {
            "north": TableDict(train=Table())
        },
        "one for each": (images, [1, 2]),
        r"^data has the keys 'image', 'label'; a dict names clients, .* as a pair \(images, labels\)$": {
            "image": images,
            "label": [0, 1, 2, 3],
        },
        r"^data is no pair of two arrays; give images and labels as \(images, labels\)$": [
            images,
            [0, 1, 2, 3],
        ],
        "^data holds several datasets; give a dict from clients' names to them$": [Torn(images, [0] * 4)] * 2,
        "^data has an int as labels; give a list or an array, one for each image$": (images, 3),
        "^data has a dict as labels": (images, {3: "cat", 2: "cat", 1: "dog", 0: "dog"}),
        "^data has a set as labels": (images, {0, 1, 2, 3}),
        "^data has a Tensor as labels": (images, torch.tensor(3)),
        "^the images of data are a list; give one array, or pairs: list": (list(images), [0, 1, 2, 3]),
        r"numbers from \S+ to 1.000001; give pixels": np.linspace(0, 1.000001, 64).reshape(4, 4, 4),
        "before normalisation": torch.from_numpy(images).permute(0, 3, 1, 2) / 127.5 - 1,
        "holds int64; give uint8, uint16, or floats": images.astype(np.int64),
        "for some images": {"a": images, "b": (images, [0, 1, 2, 3])},
        "an empty dict": {},
        "no images": images[:0],
        r"^data\[0\]: its image has no pixels: the shape is \(0, 8\)": np.zeros((4, 0, 8), np.uint8),
        r"^data\[0\]: its image holds NaN; give pixels of 0 to 255": np.full((4, 8, 8), np.nan, np.float32),
        "its label is a Tensor; give one number or text": (images, torch.zeros(4, 14)),
        "its label is a list": (images, [[0, 1]] * 4),
        "its label is a ndarray": [(image, np.arange(3)) for image in images],
        r"^data\[0\]: it has the columns scan, label, and none of them is called 'image'": [
            {"scan": image, "label": 0} for image in images
        ],
        "its label is a dict": [(image, {"a": 1}) for image in images],
        r"^data\['b'\]\[1\]: its label is 0.5; a label is a class": {
            "a": images,
            "b": (images, [1.0, 0.5, 1, 1]),
        },
        r"^data\[2\] cannot be read: OSError: a torn file \(.*line \d+\)": Torn(images, [0] * 4),
    }
    for sentence, source in wrong.items():
        with pytest.raises(UserError, match=sentence):
            give_data(source)
    for path in ("file.png", Path("file.png")):
        with pytest.raises(
            UserError, match=r"its image is a (str|PosixPath); .*PIL\.Image\.open reads a file"
        ):
            to_image(path)
    with pytest.raises(UserError, match="its image is a str"):
        to_image("file.png")
    recipe = tiny("data.source=digits")
    with pytest.raises(UserError, match="an array of images"):
        atoll.simulate(describe(recipe), tmp_path / "run", data=7)


def test_what_numbers_mean_at_each_client_is_part_of_the_fingerprint() -> None:
    names = []
    for order in (["cat", "dog"], ["cat", "dog"], ["dog", "cat"]):
        north, south = (Pairs(pixels(), [row % 2 for row in range(60)]) for _ in range(2))
        north.classes, south.classes = ["cat", "dog"], order
        names.append(str(give_data({"north": north, "south": south})))
    assert names[0] == names[1] != names[2]


def test_clients_of_other_classes_are_matched_by_name() -> None:
    images = pixels(6)
    north, south = Named(images[:3], [0, 1, 1], ["cat", "dog"]), Named(images[3:], [0, 1, 0], ["dog", "fox"])
    given = give_data({"north": north, "south": south}).value[0]
    assert [given.classes[label] for label in given.labels] == ["cat", "dog", "dog", "dog", "fox", "dog"]
    with pytest.raises(UserError, match=r"data\['west'\] has the label 0 without a name"):
        give_data({"north": north, "west": Pairs(images[3:], [0, 1, 0])})
    with pytest.raises(UserError, match="two classes are called 'dog'"):
        give_data({"north": north, "south": Named(images[3:], [0, 1, 0], ["dog", "dog"])})


@pytest.mark.parametrize("classes", [None, 10, "ab"])
def test_an_attribute_that_is_no_list_of_classes_is_not_read(classes: object) -> None:
    given = give_data(Named(pixels(4), [0, 1, 1, 0], classes)).value[0]
    assert given.classes == ["0", "1"]


def test_labels_of_pandas_are_taken_by_position() -> None:
    frame = pd.DataFrame({"label": [3, 1, 2, 0]}, index=[2, 0, 3, 1])
    assert give_data((pixels(4), frame.label)).value[0].labels.tolist() == [3, 1, 2, 0]
    assert give_data((pixels(4), None)).value[0].labels is None


def test_two_clients_of_one_name_are_refused() -> None:
    with pytest.raises(UserError, match="two clients of data are called '1'"):
        give_data({1: pixels(4), "1": pixels(4)})


def test_rows_of_clients_are_read_from_their_own_images():
    images = np.random.default_rng(0).integers(0, 256, (6, 4, 5, 3), dtype=np.uint8)
    clients = {"a": images[:1], "none": images[:0], "b": images[1:3], "c": images[3:]}
    records = give_data(clients).value[0].records
    order = np.array([5, 0, 2, 1, 4, 3, 3])
    found = [image_bytes(image) for image in records.read(order)]
    assert found == [image_bytes(to_image(images[row])) for row in order]
    with pytest.raises(IndexError):
        records.read(np.array([6]))
