"""What is said about a source's images when they are read."""

import unicodedata
import warnings

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image
from sklearn.datasets import load_digits

from atoll.commands.data import load_partition
from atoll.data.source_warnings import two_forms, warn_of_classes
from atoll.engines.federation import Federation
from tests.data.test_sources import load, pixels_of
from tests.harness import tiny


@pytest.mark.parametrize("memory", [8.0, 1e-9])
def test_twelve_bit_scans_in_a_window_of_sixteen_are_said_to_be_nearly_black(tmp_path, memory):
    for i, digit in enumerate(load_digits().images[:4]):
        Image.fromarray((digit / 16 * 4095).astype(np.uint16)).save(tmp_path / f"{i}.png")
    said = (
        r"8 bits hold values from 0 to 4095; 0 becomes black and 65535 white, so they become nearly black "
        r"\(at most 16 of 255\); to use their range, set data\.window_low = 0 and data\.window_high = 4095"
    )
    for _ in range(2):  # also when the pixels are in the cache
        with pytest.warns(UserWarning, match=said):
            load("images", tmp_path, test_fraction=0, memory_gib=memory)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        images = load("images", tmp_path, test_fraction=0, window_high=4095.0).train
    assert pixels_of(images).max() == 255


def test_values_that_fill_the_default_window_are_not_told(tmp_path):
    for i in range(2):
        Image.fromarray(np.full((8, 8), 65535 * i, dtype=np.uint16)).save(tmp_path / f"{i}.png")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load("images", tmp_path, test_fraction=0)


def test_the_values_of_all_splits_are_said_at_once(tmp_path, recwarn):
    for split, top in (("train", 3000), ("test", 4095)):
        (tmp_path / split / "a").mkdir(parents=True)
        for i in range(2):
            image = np.full((8, 8), top * i, dtype=np.uint16)
            Image.fromarray(image).save(tmp_path / split / "a" / f"{i}.png")
    load("folder", tmp_path)
    (said,) = [str(one.message) for one in recwarn]
    assert "hold values from 0 to 4095" in said


def test_images_that_are_nearly_black_are_told(tmp_path):
    Image.fromarray(np.full((8, 8), 3, dtype=np.uint8)).save(tmp_path / "0.png")
    with pytest.warns(
        UserWarning, match="the largest value of all images is 3 of 255, so they are nearly black"
    ):
        load("images", tmp_path, test_fraction=0)


def test_colour_of_sixteen_bits_of_which_only_the_upper_eight_are_read_is_told(tmp_path):
    for i in range(4):
        image = np.random.default_rng(i).integers(0, 3000, (8, 8, 3), dtype=np.uint16)
        tifffile.imwrite(tmp_path / f"{i}.tif", image, photometric="rgb")
    with pytest.warns(
        UserWarning, match="colour of 16 bits to 0 to 65535, because its upper 8 bits are read"
    ):
        load("images", tmp_path, test_fraction=0, channels=3)


def test_test_classes_without_a_training_image_are_told(tmp_path):
    for split, names in (("train", ("cat", "dog")), ("test", ("cat", "Dog", "fox"))):
        for number, name in enumerate(names):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(4):
                image = np.full((8, 8), 90 * number + 20 + i, np.uint8)
                Image.fromarray(image).save(tmp_path / split / name / f"{i}.png")
    settings = ("data.source=folder", f"data.path={tmp_path}", "partition.clients=2", "data.limit=")
    told = "8 of 12 test images are of classes without a training image: 'Dog', 'fox'; .* 'cat', 'dog'$"
    with pytest.warns(UserWarning, match=told):
        Federation(tiny(*settings))
    with pytest.warns(UserWarning, match=told):
        load_partition(tiny(*settings))
    Federation(tiny(*settings, "data.labels=false"))  # no label is read
    with pytest.warns(UserWarning, match=told):
        splits = Federation(tiny(*settings, "data.limit=1000")).splits
    assert splits.test is not None
    dogs = splits.train.subset(torch.arange(4, 8))
    cats = splits.test.subset(torch.arange(4))
    warn_of_classes(dogs, cats, limit=4)  # the cats may be among the images that were not drawn
    with pytest.warns(UserWarning, match=r"4 of 4 test images .* 'cat'"):
        warn_of_classes(dogs, cats, limit=None)
    load("folder", tmp_path)  # a site may well lack classes


def test_a_class_in_two_forms_of_unicode_is_told(tmp_path):
    """As in folders of two clients of which one has a Mac: their names look alike."""
    for client, form in (("a", "NFC"), ("b", "NFD")):
        for number, name in enumerate(("Hände", "Köpfe" if client == "a" else "Kopfe")):
            folder = tmp_path / client / unicodedata.normalize(form, name)
            folder.mkdir(parents=True)
            for i in range(6):
                image = np.full((8, 8), 90 * number + 20 + i, np.uint8)
                Image.fromarray(image).save(folder / f"{i}.png")
    settings = ("data.source=clients", f"data.path={tmp_path}", "partition.kind=natural", "data.limit=")
    told = r"^the classes 'Ha\\u0308nde' and 'H\\xe4nde' count as two, .*; rename one as the other$"
    with pytest.warns(UserWarning, match=told):
        splits = Federation(tiny(*settings)).splits
    assert len(splits.train.classes) == 4  # o and ö are no forms of one letter
    assert not two_forms(["Köpfe", "Kopfe", "Köpfe"])


def test_a_source_of_one_class_is_told(tmp_path):
    """Any encoder reaches 100 %, such as on a folder that holds one folder of images of all classes."""
    for name in ("images", "others"):
        (tmp_path / name).mkdir()
        for i in range(10):
            Image.fromarray(np.full((8, 8), 20 + i, np.uint8)).save(tmp_path / name / f"{i}.png")
        settings = (
            "data.source=folder",
            f"data.path={tmp_path}",
            "partition.kind=iid",
            "partition.clients=2",
        )
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            load_partition(tiny(*settings))
            load_partition(tiny(*settings, "data.labels=false"))
        one = "all training images are of one class, 'images', so no accuracy says anything of the encoder; "
        told = [str(each.message) for each in said if str(each.message).startswith(one)]
        assert len(told) == (name == "images")


def test_test_images_that_are_also_training_images_are_told(tmp_path):
    digits = (load_digits().images[:12] * 15).astype(np.uint8)
    for split, rows in (("train", range(8)), ("test", (8, 3, 9, 7, 3))):
        (tmp_path / split / "a").mkdir(parents=True)
        for i, row in enumerate(rows):
            Image.fromarray(digits[row]).save(tmp_path / split / "a" / f"{i}.png")
    settings = ("data.source=folder", f"data.path={tmp_path}", "data.image_size=8", "partition.clients=2")
    told = r"3 of 5 test images are also training images, pixel by pixel \(such as the test images 1, 3, 4\)"
    with pytest.warns(UserWarning, match=told):
        load_partition(tiny(*settings))
    for quiet in ((*settings, "data.memory_gib=1e-9"), ()):  # streamed images; scikit-learn's digits
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            load_partition(tiny(*quiet))
        assert not [one for one in said if "pixel by pixel" in str(one.message)]
