"""Folders by class, by client, and plain; torchvision's ImageFolder is the oracle for the first."""

import shutil
import warnings

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import ImageFolder

from atoll.core.errors import UserError
from atoll.data.options import DataOptions, PartitionOptions
from atoll.data.partition.make import partition_images
from atoll.data.sources import load_data
from tests.data.test_sources import pixels_of


def load(source, path, **options):
    options = {"test_fraction": 0.0, "image_size": 8, "channels": 1, **options}
    return load_data(DataOptions(source, str(path), **options), seed=0)


@pytest.fixture
def place(digits, encode_png):
    """Puts digits number `first`, … at the given paths."""

    def put(root, *names, first=0):
        for i, name in enumerate(names):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(encode_png(digits[0][first + i]))

    return put


def test_class_folders_follow_torchvision(tmp_path, place):
    place(tmp_path, "cat/b.png", "cat/a.PNG", "ant/z.png", "dog/deep/er/c.png", "dog/x.png")
    (tmp_path / "cat" / "notes.txt").write_text("not an image")
    (tmp_path / "cat" / ".hidden.png").write_text("not for us")
    (tmp_path / ".git").mkdir()
    (tmp_path / "cat" / ".hidden.png").unlink()
    (tmp_path / ".git").rmdir()
    expected = ImageFolder(str(tmp_path))
    with pytest.warns(UserWarning, match=r"skipped files without an image suffix: 1 \.txt$"):
        images = load("folder", tmp_path).train
    assert images.classes == expected.classes
    assert images.labels.tolist() == expected.targets
    grey = [np.asarray(Image.open(path).convert("L")) for path, _ in expected.samples]
    assert sorted(map(bytes, pixels_of(images))) == sorted(map(bytes, grey))
    for label in range(3):
        assert {bytes(pixels) for pixels in pixels_of(images)[images.labels.numpy() == label]} == {
            bytes(pixels) for pixels, target in zip(grey, expected.targets, strict=True) if target == label
        }


def test_files_that_are_no_images_are_counted_by_suffix_in_one_line(tmp_path, place):
    place(tmp_path, "cat/a.png", "dog/b.png")
    for name in ("cat/1.raw", "cat/2.RAW", "dog/README", ".hidden.raw"):
        (tmp_path / name).write_text("no image")
    said = r"skipped files without an image suffix: 2 \.raw, 1 without a suffix"
    with pytest.warns(UserWarning, match=said) as caught:
        load("folder", tmp_path)
    assert len(caught) == 1


def test_hidden_files_are_passed_over(tmp_path, place):
    place(tmp_path, "cat/a.png", "cat/.b.png", ".trash/c.png", "cat/.cache/d.png", "dog/e.png")
    (tmp_path / ".git").mkdir()
    with pytest.warns(
        UserWarning, match=r"skipped hidden folders that hold images: \.trash; to read"
    ) as caught:
        images = load("folder", tmp_path).train
    assert (len(images), images.classes, len(caught)) == (2, ["cat", "dog"], 1)


@pytest.mark.parametrize("source", ["folder", "clients", "images"])
def test_links_to_folders_are_followed_but_not_back_up(tmp_path, place, source):
    place(tmp_path, "real/a.png", "real/deep/b.png", "images/x/y/c.png", "images/z/y/d.png")
    (tmp_path / "images/x/y/linked").symlink_to(tmp_path / "real")
    (tmp_path / "real/deep/back").symlink_to(tmp_path / "real")
    (tmp_path / "images/x/y/up").symlink_to(tmp_path / "images")
    assert len(load(source, tmp_path / "images").train) == 4


def test_names_that_are_no_text_are_read(tmp_path, place):
    folder, name = "caf\udce9", "r\udce9sum\udce9.png"  # Latin-1, as Python keeps it
    place(tmp_path, f"{folder}/{name}", f"{folder}/other.png", "tea/x.png")
    images = load("folder", tmp_path).train
    assert (images.classes, images.labels.tolist()) == (["caf\ufffd", "tea"], [0, 0, 1])


def test_splits_agree_on_classes_where_one_lacks_some(tmp_path, place):
    place(
        tmp_path, "train/ant/a.png", "train/cat/b.png", "train/dog/c.png", "test/cat/d.png", "test/eel/e.png"
    )
    splits = load("folder", tmp_path)
    assert splits.train.classes == ["ant", "cat", "dog"]
    assert splits.test.classes == ["ant", "cat", "dog", "eel"]
    assert splits.test.labels.tolist() == [1, 3]


def test_a_class_may_be_called_train(tmp_path, place):
    place(tmp_path, "train/a.png", "bus/b.png", "test/c.png")
    with pytest.warns(UserWarning, match="folders called 'test', 'train', .* if they are splits"):
        assert load("folder", tmp_path).train.classes == ["bus", "test", "train"]


def test_a_named_split_must_be_there(tmp_path, place):
    place(tmp_path, "train/cat/a.png", "train/dog/b.png")
    assert load("folder", tmp_path).test is None
    for options in ({"test_split": "holdout"}, {"train_split": "fit", "test_split": "test"}):
        with pytest.raises(UserError, match="split"):
            load("folder", tmp_path, **options)


@pytest.mark.parametrize("source", ["folder", "clients", "images"])
def test_another_training_split_must_be_there(tmp_path, place, source):
    """Else the other splits would be read as classes, or as clients."""
    place(tmp_path, "train/cat/a.png", "test/cat/b.png", "fitted.png")
    said = r"holds no folder .*'fit' for the training split, but 'test', 'train'; set data\.train_split"
    with pytest.raises(UserError, match=said):
        load(source, tmp_path, train_split="fit")
    place(tmp_path, "fit/cat/a.png", "fit/dog/b.png")
    assert len(load(source, tmp_path, train_split="fit").train) == 2


@pytest.mark.filterwarnings("ignore:.*skipped files without an image suffix")
@pytest.mark.parametrize("source", ["folder", "clients"])
def test_loose_images_beside_class_or_client_folders_are_refused(tmp_path, place, source):
    place(tmp_path, "north/a.png", "south/b.png", "z.PNG", "c.png", ".hidden.png")
    (tmp_path / "notes.txt").write_text("not an image")
    with pytest.raises(UserError, match=r"/c\.png is next to the .* folders and in none .*\(2 such images\)"):
        load(source, tmp_path)
    assert len(load("images", tmp_path).train) == 4
    for name in ("z.PNG", "c.png"):
        (tmp_path / name).unlink()
    assert len(load(source, tmp_path).train) == 2


def test_clients_without_labels(tmp_path, place, digits):
    place(tmp_path, "north/a.png", "north/b.png", "south/c.png")
    images = load("clients", tmp_path).train
    assert images.labels is None
    assert images.columns["client"].tolist() == [0, 0, 1]
    assert images.column_values == {"client": ["north", "south"]}
    assert np.array_equal(pixels_of(images), digits[0][:3])
    partition = partition_images(images, PartitionOptions("natural"), seed=0)
    assert (partition.names, partition.sizes) == (["north", "south"], [2, 1])


def test_clients_with_class_folders_that_not_all_of_them_have(tmp_path, place):
    place(tmp_path, "north/cat/a.png", "north/dog/b.png", "south/dog/c.png", "south/dog/left/d.png")
    images = load("clients", tmp_path).train
    assert images.classes == ["cat", "dog"]
    assert images.labels.tolist() == [0, 1, 1, 1]
    assert images.columns["client"].tolist() == [0, 0, 1, 1]
    unlabelled = load("clients", tmp_path, labels=False).train
    assert (unlabelled.labels, len(unlabelled)) == (None, 4)


def test_the_only_client_is_told_of(tmp_path, place):
    """The folder above that of the clients holds one folder; its classes would be the clients."""
    place(tmp_path, "scans/north/a.png", "scans/south/b.png")
    with pytest.warns(
        UserWarning, match=r"holds one folder, 'scans', so there is one client; .* data\.path to .*scans$"
    ):
        images = load("clients", tmp_path).train
    assert images.column_values == {"client": ["scans"]}


def test_clients_in_two_splits(tmp_path, place):
    place(tmp_path, "train/n/a.png", "train/s/b.png", "test/s/c.png")
    splits = load("clients", tmp_path)
    assert splits.test.columns["client"].tolist() == [1]
    assert splits.test.column_values["client"] == ["n", "s"]


def test_clients_share_the_held_out_part(tmp_path, place):
    place(tmp_path, *(f"{client}/{i:02}.png" for client in "ab" for i in range(20)))
    splits = load("clients", tmp_path, test_fraction=0.2)
    assert torch.bincount(splits.test.columns["client"]).tolist() == [4, 4]


def test_half_sorted_clients_are_refused(tmp_path, place):
    place(tmp_path, "north/cat/a.png", "south/b.png")
    with pytest.raises(UserError, match=r"south/b\.png, are not"):
        load("clients", tmp_path)
    assert len(load("clients", tmp_path, labels=False).train) == 2


def test_plain_folders_at_any_depth_in_the_order_of_names(tmp_path, place, digits):
    place(tmp_path, "2020/a.png", "2020/b/c.png", "2021/a.png", "z.png")
    images = load("images", tmp_path).train
    assert images.labels is None
    assert np.array_equal(pixels_of(images), digits[0][:4])


def test_plain_folders_with_splits(tmp_path, place):
    place(tmp_path, "train/a.png", "train/b.png", "val/c.png")
    splits = load("images", tmp_path)
    assert (len(splits.train), len(splits.test)) == (2, 1)


def test_sixteen_bit_scans(tmp_path):
    values = np.arange(64, dtype=np.uint16).reshape(8, 8) * 65
    Image.fromarray(values).save(tmp_path / "scan.tiff")
    images = load("images", tmp_path, window_high=4095.0).train
    assert np.array_equal(pixels_of(images)[0], np.rint(values * (255 / 4095)))


def test_the_fingerprint_carries_the_names(tmp_path, place):
    place(tmp_path / "one", "cat/a.png", "dog/b.png")
    place(tmp_path / "two", "cat/a.png", "dog/b.png")
    place(tmp_path / "three", "cat/a.png", "eel/b.png")
    prints = [load("folder", tmp_path / name).train.fingerprint for name in ("one", "two", "three")]
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize(
    ("source", "sentence"),
    [("folder", "no class folders"), ("clients", "no client folders"), ("images", "holds no images")],
)
def test_an_empty_folder_gets_a_sentence(tmp_path, source, sentence):
    with pytest.raises(UserError, match=sentence):
        load(source, tmp_path)


@pytest.mark.parametrize(("source", "kind"), [("folder", "class"), ("clients", "client")])
def test_an_empty_class_or_client_is_named(tmp_path, place, source, kind):
    place(tmp_path, "full/a.png")
    (tmp_path / "hollow").mkdir()
    with pytest.raises(UserError, match=rf"the {kind} folder .*hollow holds no images"):
        load(source, tmp_path)


@pytest.mark.parametrize("split", ["/etc", "../other", "a/../../b"])
@pytest.mark.parametrize("name", ["train_split", "test_split"])
def test_a_split_lies_in_the_folder(tmp_path, name, split):
    """A coordinator's recipe must not choose other folders of a site."""
    with pytest.raises(UserError, match=rf"data\.{name} = .* leads out of data\.path"):
        load("images", tmp_path, **{name: split})


@pytest.mark.parametrize("source", ["images", "folder"])
def test_folders_beside_the_only_split_are_told(tmp_path, place, source):
    place(tmp_path, *(f"{name}/{part}/0.png" for name in ("airplane", "car", "train") for part in ("a", "b")))
    with pytest.warns(
        UserWarning, match="'train' is read as the training split, and airplane, car not at all"
    ):
        assert len(load(source, tmp_path, test_fraction=0).train) == 2


@pytest.mark.parametrize(
    ("source", "meaning"),
    [("folder", "as classes"), ("clients", "as clients"), ("images", "without a split")],
)
@pytest.mark.parametrize("names", [("Training", "Testing"), ("Train", "VAL")])
def test_folders_of_splits_with_other_names_are_told(tmp_path, place, source, meaning, names):
    """As data sets have them; otherwise the labels are the splits, and test images train."""
    place(tmp_path, *(f"{name}/{part}/{i}.png" for name in names for part in ("a", "b") for i in range(2)))
    first, second = sorted(names)
    told = (
        f"holds no folder 'train', so '{first}', '{second}' are read {meaning}; if they are splits, "
        "call them 'train' and 'test', or set data.train_split and data.test_split"
    )
    with pytest.warns(UserWarning, match=told):
        load(source, tmp_path, test_fraction=0.5)
    splits = load(source, tmp_path, train_split=names[0], test_split=names[1])  # as it says, and not told
    assert (len(splits.train), len(splits.test)) == (4, 4)


def test_a_class_with_the_name_of_a_split_is_not_told(tmp_path, place):
    place(tmp_path, *(f"{name}/{i}.png" for name in ("car", "train") for i in range(2)))
    assert load("folder", tmp_path, test_fraction=0).train.classes == ["car", "train"]


@pytest.mark.parametrize("source", ["folder", "clients", "images"])
@pytest.mark.parametrize("split", ["train", "test"])
def test_an_empty_split_is_named_and_not_left_out(tmp_path, place, source, split):
    """As of a disk that is not mounted: the run would hold out training images instead, or see a class 'test'."""
    place(tmp_path, "train/a/1.png", "train/b/2.png", "test/a/3.png", "test/b/4.png")
    shutil.rmtree(tmp_path / split)
    (tmp_path / split).mkdir()
    with pytest.raises(UserError, match=rf"{split} holds no images"):
        load(source, tmp_path)


@pytest.mark.parametrize(
    ("source", "inner", "layout"),
    [
        (
            "folder",
            "",
            "train/CLASS/IMAGE and test/CLASS/IMAGE in .*; if there are no classes, set data.source",
        ),
        ("clients", "", "train/CLIENT/CLASS/IMAGE and test/CLIENT/CLASS/IMAGE in"),
        ("folder", "cat/", "train/CLASS/IMAGE and test/CLASS/IMAGE in"),
        ("clients", "north/", "train/CLIENT/CLASS/IMAGE and test/CLIENT/CLASS/IMAGE in"),
        ("images", "2024/", "train/IMAGE and test/IMAGE in"),
    ],
)
def test_splits_that_are_read_as_classes_or_clients_are_told(tmp_path, place, source, inner, layout):
    """Renaming is no remedy where the names are right and the folders are not where a split is looked for."""
    below = "dog/" if inner else ""  # a folder of folders at the top would be a split
    place(tmp_path, *(f"{inner}{split}/{below}{i}.png" for split in ("train", "test") for i in range(2)))
    place(tmp_path, *([] if not inner else ["other/dog/0.png"]), first=4)
    told = f"{inner.strip('/')} holds folders called 'test', 'train', whose images are all read .*as {layout}"
    with pytest.warns(UserWarning, match=told) as caught:
        assert load(source, tmp_path).test is None
    assert len(caught) == 1


def test_folders_of_splits_are_told_once_for_all_clients(tmp_path, place):
    place(tmp_path, *(f"{client}/{split}/dog/0.png" for client in "abc" for split in ("Training", "valid")))
    with pytest.warns(
        UserWarning, match=r"a holds folders called 'Training', 'valid' \(as do 2 other"
    ) as caught:
        load("clients", tmp_path)
    assert len(caught) == 1


def test_one_name_of_a_split_inside_a_class_is_not_told(tmp_path, place):
    place(tmp_path, "bus/train/0.png", "bus/old/1.png", "car/test/2.png")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load("folder", tmp_path)
