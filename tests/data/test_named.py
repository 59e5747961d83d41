"""Datasets by name: torchvision's, against the same images read from files, and the hub's."""

import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torchvision.datasets
from PIL import Image
from sklearn.datasets import load_digits

from atoll.core.errors import UserError
from tests.data.test_sources import load, pixels_of


class Letters(torchvision.datasets.VisionDataset):
    """A data set in torchvision's manner: digits, of which the test split has the last ten."""

    classes = tuple("abcdefghij")

    def __init__(self, root, train=True, transform=None, target_transform=None, download=False):
        super().__init__(root, transform=transform, target_transform=target_transform)
        if not (download or (Path(root) / "letters").exists()):
            raise RuntimeError("Dataset not found. You can use download=True to download it")
        self.root, self.rows = root, range(30) if train else range(50, 60)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        data = load_digits()
        pixels = np.rint(data.images[self.rows[i]] * (255 / 16)).astype(np.uint8)
        return Image.fromarray(pixels), int(data.target[self.rows[i]])


@pytest.mark.parametrize("origin", [None, "elsewhere/__init__.py"], ids=["file", "loader"])
def test_the_digits_are_scikit_learns(origin, monkeypatch):
    """Read from its file, or, where it keeps that elsewhere, by its loader."""
    if origin:
        monkeypatch.setattr("atoll.data.named.find_spec", lambda name: ModuleSpec(name, None, origin=origin))
    splits = load(source="digits", test_fraction=0)
    expected = load_digits()
    assert np.array_equal(pixels_of(splits.train), np.rint(expected.images * 255 / 16))
    assert splits.train.labels.tolist() == expected.target.tolist()
    assert splits.train.classes == [str(name) for name in expected.target_names]


def test_torchvision_by_name(monkeypatch, digits, tmp_path):
    monkeypatch.setattr(torchvision.datasets, "Letters", Letters, raising=False)
    monkeypatch.setattr(torchvision.datasets, "__all__", (*torchvision.datasets.__all__, "Letters"))
    splits = load("torchvision", "Letters")
    assert np.array_equal(pixels_of(splits.train), digits[0][:30])
    assert splits.test.labels.tolist() == digits[1][50:].tolist()
    assert splits.train.classes == list("abcdefghij")
    (tmp_path / "letters").touch()
    monkeypatch.setenv("ATOLL_DATA", str(tmp_path))  # found there: nothing is downloaded
    assert load("torchvision", "Letters").train.fingerprint == splits.train.fingerprint


def test_torchvision_names_are_checked():
    with pytest.raises(UserError, match="did you mean 'CIFAR10'"):
        load("torchvision", "CIFAR11")


def test_torchvision_offline_gets_a_sentence(monkeypatch):
    def offline(*args, **kwargs):
        raise OSError("Name or service not known")

    monkeypatch.setattr(torchvision.datasets.mnist, "download_and_extract_archive", offline)
    with pytest.raises(UserError, match=r"cannot load torchvision's MNIST: .*network"):
        load("torchvision", "MNIST")


def test_the_hub_needs_its_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"'\.\[hub\]'"):
        load("hub", "someone/something")


def fake_hub(monkeypatch, splits):
    library = types.ModuleType("datasets")
    library.load_dataset = splits
    monkeypatch.setitem(sys.modules, "datasets", library)


def test_the_hub_offline_gets_a_sentence(monkeypatch):
    def offline(path, config):
        raise ConnectionError(f"Couldn't reach '{path}' on the Hub\nand more")

    fake_hub(monkeypatch, offline)
    with pytest.raises(UserError, match=r"cannot load the hub dataset 'someone/something': Couldn't reach"):
        load("hub", "someone/something")


def test_the_hub_gives_tables(monkeypatch, digits, encode_png, write_parquet, tmp_path):
    images, labels = [encode_png(image) for image in digits[0]], digits[1]
    path = write_parquet(tmp_path / "t.parquet", images, {"label": list("abcdefghij")}, label=labels)
    table = pa.parquet.read_table(path)

    def dataset(rows):
        return types.SimpleNamespace(data=types.SimpleNamespace(table=rows, column=rows.column))

    fake_hub(monkeypatch, lambda path, config: {"train": dataset(table[:40]), "test": dataset(table[40:])})
    splits = load("hub", "someone/something")
    assert np.array_equal(pixels_of(splits.train), digits[0][:40])
    assert splits.test.labels.tolist() == labels[40:].tolist()
    assert splits.test.classes == list("abcdefghij")
    with pytest.raises(UserError, match="no split 'tset'; did you mean 'test'"):
        load("hub", "someone/something", test_split="tset")
    with pytest.raises(UserError, match="no column 'img'"):
        load("hub", "someone/something", image_column="img")


@pytest.mark.parametrize("changed", [None, "label", "site"])
def test_labels_and_clients_are_part_of_the_hubs_fingerprint(
    monkeypatch, digits, encode_png, write_parquet, tmp_path, changed
):
    """The same images under two names: the second run's folder of the first is not taken for its own."""
    images, found = [encode_png(image) for image in digits[0]], []
    for name in ("first", "second"):
        columns = {"label": digits[1].copy(), "site": np.arange(60) % 3}
        if changed and name == "second":
            columns[changed][7] += 1
        table = pa.parquet.read_table(write_parquet(tmp_path / f"{name}.parquet", images, **columns))
        rows = types.SimpleNamespace(data=types.SimpleNamespace(table=table, column=table.column))
        fake_hub(monkeypatch, lambda path, config, rows=rows: {"train": rows})
        found.append(
            load("hub", f"someone/{name}", natural_column="site", test_fraction=0.0).train.fingerprint
        )
    assert (found[0] == found[1]) is (changed is None)


def idx(path, images, labels):
    """Write images and labels in MNIST's format."""
    n, height, width = images.shape
    written = {"images-idx3": ([2051, n, height, width], images), "labels-idx1": ([2049, n], labels)}
    for kind, (magic, data) in written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        header = np.array(magic, dtype=">i4").tobytes()
        path.with_name(f"{path.name}-{kind}-ubyte").write_bytes(header + data.astype(np.uint8).tobytes())


def test_emnists_splits_are_choices_of_classes(monkeypatch, tmp_path):
    rng = np.random.default_rng(0)
    pixels = {"train": rng.integers(0, 255, (60, 28, 28)), "test": rng.integers(0, 255, (20, 28, 28))}
    for split, images in pixels.items():
        labels = np.arange(len(images)) % 26 + 1
        idx(tmp_path / "EMNIST" / "raw" / f"emnist-letters-{split}", images, labels)
    monkeypatch.setenv("ATOLL_DATA", str(tmp_path))
    splits = load("torchvision", "EMNIST", train_split="letters", image_size=28)
    assert np.array_equal(pixels_of(splits.train), pixels["train"])
    assert np.array_equal(pixels_of(splits.test), pixels["test"])
    assert splits.train.classes[1:4] == ["a", "b", "c"]
    with pytest.raises(UserError, match=r"Valid values are .*'letters'"):
        load("torchvision", "EMNIST", image_size=28)


class Cranes(torchvision.datasets.ImageFolder):
    """As torchvision's ImageNet: unpacked folders, tuples as classes, of which two are equal, and no test set."""

    def __init__(self, root, split="train", **kwargs):
        if split not in ("train", "val"):
            raise ValueError(f"Unknown value {split!r} for argument split.")
        super().__init__(str(Path(root) / "cranes" / split), **kwargs)
        self.classes = [("crane", "bird"), ("crane",), ("crane",), ("kite",)]


@pytest.fixture
def cranes(monkeypatch, tmp_path):
    """Every pixel of an image is its label and its split: 100 · label + 20 in training, + 40 in validation."""
    monkeypatch.setattr(torchvision.datasets, "Cranes", Cranes, raising=False)
    monkeypatch.setattr(torchvision.datasets, "__all__", (*torchvision.datasets.__all__, "Cranes"))
    monkeypatch.setenv("ATOLL_DATA", str(tmp_path))
    for split, least in (("train", 20), ("val", 40)):
        for label in range(4):
            folder = tmp_path / "cranes" / split / f"n{label}"
            folder.mkdir(parents=True)
            for i in range(3):
                Image.fromarray(np.full((8, 8), 50 * label + least, np.uint8)).save(folder / f"{i}.png")
    return tmp_path / "cranes"


def test_two_classes_of_one_name_stay_two(cranes):
    splits = load("torchvision", "Cranes")
    for images, least in ((splits.train, 20), (splits.test, 40)):
        assert images.labels.tolist() == ((pixels_of(images)[:, 0, 0] - least) // 50).tolist()
        assert images.classes == ["crane, bird", "crane", "crane", "kite"]


def test_files_that_torchvision_unpacked_may_change(cranes):
    before = load("torchvision", "Cranes").train
    Image.fromarray(np.full((8, 8), 255, np.uint8)).save(cranes / "train" / "n0" / "0.png")
    after = load("torchvision", "Cranes").train
    assert before.fingerprint != after.fingerprint
    assert (pixels_of(after)[0] == 255).all()


def test_torchvisions_images_may_lie_below_the_home_folder(cranes, monkeypatch):
    monkeypatch.setenv("HOME", str(cranes.parent.parent))
    monkeypatch.setenv("ATOLL_DATA", f"~/{cranes.parent.name}")
    assert len(load("torchvision", "Cranes").train) == 12
