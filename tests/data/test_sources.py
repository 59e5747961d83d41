"""Sources end to end: splits are what they claim, names find data, mistakes get sentences."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from atoll.core.errors import UserError
from atoll.data.objects import give_data
from atoll.data.options import DataOptions
from atoll.data.sources import _hold_out, load_data

HOW = {"image_size": 8, "channels": 1}


def pixels_of(images):
    return images.images.gather(torch.arange(len(images))).numpy()[:, 0]


def load(source, path=None, seed=0, **options):
    return load_data(DataOptions(source, None if path is None else str(path), **{**HOW, **options}), seed)


# Digits


def test_digits_are_scikit_learns_split_in_a_stratified_way():
    splits = load("digits")
    data = load_digits()
    assert (len(splits.train), len(splits.test)) == (1438, 359)
    shares = torch.bincount(splits.test.labels) / torch.tensor(np.bincount(data.target))
    assert shares.numpy() == pytest.approx(0.2, abs=0.006)
    assert splits.train.classes == [str(digit) for digit in range(10)]
    both = np.concatenate([pixels_of(splits.train), pixels_of(splits.test)]).reshape(1797, -1)
    original = np.rint(data.images * (255 / 16)).astype(np.uint8).reshape(1797, -1)
    assert sorted(map(bytes, both)) == sorted(map(bytes, original))


def test_a_path_without_a_source_that_reads_it_is_said_to_be_unread():
    with pytest.warns(
        UserWarning, match=r"data\.path = 'my-images' is not read, because data\.source is 'digits'"
    ):
        load("digits", "my-images")
    load("synthetic", "cifar10", limit=20)  # a choice, and many a recipe's base has a path


def test_digits_test_set_is_the_same_for_every_seed():
    assert load("digits", seed=1).test.fingerprint == load("digits", seed=2).test.fingerprint


def test_digits_are_enlarged_bilinearly_and_repeated_over_channels():
    images = load("digits", image_size=16, channels=3).train
    assert images.images.shape == (1438, 3, 16, 16)
    batch = images.images.gather(torch.arange(5))
    assert torch.equal(batch[:, 0], batch[:, 2])
    small = torch.from_numpy(pixels_of(load("digits").train)[:5, None].astype(np.float32))
    smooth = torch.nn.functional.interpolate(small, scale_factor=2, mode="bilinear")
    assert (batch[:, :1] - smooth).abs().max() <= 0.51  # rounded to bytes


# Splits


def test_validation_is_held_out_of_train_by_seed_and_leaves_test_alone():
    plain = load("digits")
    first, again, other = (load("digits", seed=seed, validation_fraction=0.1) for seed in (1, 1, 2))
    assert (len(first.train), len(first.validation)) == (1294, 144)
    together = np.concatenate([pixels_of(first.train), pixels_of(first.validation)]).reshape(1438, -1)
    assert sorted(map(bytes, together)) == sorted(map(bytes, pixels_of(plain.train).reshape(1438, -1)))
    assert first.validation.fingerprint == again.validation.fingerprint != other.validation.fingerprint
    assert first.test.fingerprint == plain.test.fingerprint
    assert torch.bincount(first.validation.labels).tolist() == pytest.approx([14.4] * 10, abs=1.1)


def test_limits_are_nested_random_and_free_of_the_seed():
    small, large = load("digits", limit=50), load("digits", limit=200)
    assert (len(small.train), len(small.test)) == (50, 359)
    contained = set(map(bytes, pixels_of(large.train).reshape(200, -1)))
    assert contained.issuperset(map(bytes, pixels_of(small.train).reshape(50, -1)))
    whole = load("digits").train
    assert not np.array_equal(pixels_of(small.train), pixels_of(whole)[:50])
    assert load("digits", limit=50, seed=9).train.fingerprint == small.train.fingerprint
    assert load("digits", limit=10**6).train.fingerprint == load("digits").train.fingerprint


def test_a_fraction_of_nothing_is_refused(write_parquet, tmp_path, encode_png, digits):
    path = write_parquet(tmp_path / "two.parquet", [encode_png(image) for image in digits[0][:2]])
    with pytest.raises(
        UserError, match=r"^data\.test_fraction = 0\.2 cannot be held out of 2 images; set it to 0"
    ):
        load("parquet", path)
    whole = load("parquet", path, test_fraction=0.0)
    assert (len(whole.train), whole.test) == (2, None)


def test_labels_can_be_left_unread():
    splits = load("digits", labels=False)
    assert splits.train.labels is None
    assert splits.train.classes == []
    assert len(splits.test) == 359


def test_marks_of_unlabelled_images_among_labels_are_said_to_be_a_class(recwarn):
    images = np.zeros((6, 8, 8), np.uint8)

    def load(marks: list[int], **options: object) -> list[str]:
        given = give_data((images, marks))
        load_data(DataOptions(source="object", path=given, image_size=8, test_fraction=0, **options), seed=0)
        return [str(one.message) for one in recwarn.list if "of its own" in str(one.message)]

    assert load([-1, 1, 1, -1, 1, 1]) == []  # two classes
    assert load([-1, 0, 1, -1, 1, -1], labels=False) == []
    assert load([-1, 0, 1, -1, 1, -1])[0].startswith(
        "3 of 6 images have the label -1, which counts as a class"
    )


def test_the_memory_budget_decides_how_but_not_what():
    stored, streamed = load("digits"), load("digits", memory_gib=1e-6)
    assert type(stored.train.images) is not type(streamed.train.images)
    assert np.array_equal(pixels_of(stored.train), pixels_of(streamed.train))
    assert stored.train.fingerprint == streamed.train.fingerprint


# Corrupt images, whichever source they are in


@pytest.fixture
def damaged(tmp_path, digits, encode_png):
    root = tmp_path / "scans"
    root.mkdir()
    for i, image in enumerate(digits[0][:20]):
        (root / f"{i:02}.png").write_bytes(encode_png(image) if i not in (4, 11) else b"no image")
    return root


def test_corrupt_images_are_refused_by_name(damaged):
    with pytest.raises(UserError, match=r"2 of 20 images .*04\.png .*11\.png .*on_corrupt = 'skip'"):
        load("images", damaged, test_fraction=0.0)


@pytest.mark.parametrize("memory_gib", [1.0, 1e-6])
def test_corrupt_images_are_skipped_with_a_warning(damaged, digits, memory_gib):
    options = {"test_fraction": 0.0, "on_corrupt": "skip", "memory_gib": memory_gib}
    with pytest.warns(UserWarning, match=r"skipped 2 of 20 images, which cannot be decoded: 04\.png"):
        images = load("images", damaged, **options).train
    assert np.array_equal(pixels_of(images), np.delete(digits[0][:20], [4, 11], axis=0))
    with pytest.raises(UserError, match="2 of 20"):  # having been skipped before excuses nothing
        load("images", damaged, **{**options, "on_corrupt": "refuse"})


def test_corrupt_images_of_both_splits_are_named_at_once(damaged):
    for i in range(12, 16):
        (damaged / f"{i}.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"^6 of 20 images cannot be decoded: .* and 3 more; repair"):
        load("images", damaged, test_fraction=0.5)
    with pytest.warns(UserWarning, match=r"skipped 6 of 20 images"):
        splits = load("images", damaged, test_fraction=0.5, on_corrupt="skip")
    assert len(splits.train) + len(splits.test) == 14
    assert max(len(splits.train), len(splits.test)) < 10, (
        "each split must have some, or the test shows nothing"
    )


def test_skipping_needs_something_left(damaged):
    for path in damaged.iterdir():
        path.write_bytes(b"")
    with pytest.raises(UserError, match="none is left"):
        load("images", damaged, test_fraction=0.0, on_corrupt="skip")


# Paths and options


def test_a_relative_path_is_looked_for_under_atoll_data(damaged, monkeypatch):
    with pytest.raises(UserError, match=r"no file or folder 'scans' .*ATOLL_DATA"):
        load("images", "scans")
    monkeypatch.setenv("ATOLL_DATA", str(damaged.parent))
    with pytest.raises(UserError, match="cannot be decoded"):
        load("images", "scans")
    with pytest.raises(UserError, match="no file or folder 'scams'"):
        load("images", "scams")


def test_atoll_data_may_begin_at_home(damaged, monkeypatch):
    monkeypatch.setenv("HOME", str(damaged.parent.parent))
    monkeypatch.setenv("ATOLL_DATA", f"~/{damaged.parent.name}")
    with pytest.raises(UserError, match="cannot be decoded"):
        load("images", "scans")


def test_a_name_that_a_recipe_could_not_hold_is_refused():
    with pytest.raises(UserError, match="the name 'bilder�' is not valid UTF-8; rename it"):
        load("images", "bilder\udce9")


@pytest.mark.parametrize("source", ["folder", "clients", "images"])
def test_a_file_is_no_folder(tmp_path, source):
    (tmp_path / "file.png").write_text("")
    with pytest.raises(UserError, match="reads a folder"):
        load(source, tmp_path / "file.png")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"source": "digit"}, "did you mean 'digits'"),
        ({"source": "parquet"}, "needs data.path"),
        ({"channels": 0}, "channels"),
        ({"image_size": 0}, "image_size"),
        ({"limit": 0}, "limit"),
        ({"test_fraction": 1.0}, "test_fraction"),
        ({"validation_fraction": -0.1}, "validation_fraction"),
        ({"on_corrupt": "ignore"}, "on_corrupt"),
        ({"window": "auto"}, "window"),
        ({"window_low": 5.0, "window_high": 5.0}, "window_low"),
        ({"memory_gib": 0.0}, "memory_gib"),
    ],
)
def test_wrong_options_get_a_sentence(options, sentence):
    with pytest.raises(UserError, match=sentence):
        DataOptions(**options)


@pytest.mark.parametrize(("clients", "classes", "each"), [(20, 30, 1), (10, 20, 2), (5, 40, 1)])
def test_what_is_held_out_is_of_all_clients_and_classes(clients, classes, each):
    labels = np.repeat(np.arange(classes), clients * each)
    owners = np.tile(np.repeat(np.arange(clients), each), classes)
    rest, held = _hold_out(len(labels), [labels, owners], 0.2, np.random.default_rng(0))
    assert sorted([*rest, *held]) == list(range(len(labels)))
    assert (abs(np.bincount(labels[held]) - 0.2 * clients * each) <= 1).all()
    assert (np.bincount(owners[held], minlength=clients) > 0).all()
    assert (np.bincount(owners[rest], minlength=clients) > 0).all()


def test_few_clients_contribute_their_share_of_each_class():
    labels, owners = np.repeat(np.arange(4), 100), np.tile(np.arange(2), 200)
    _, held = _hold_out(400, [labels, owners], 0.2, np.random.default_rng(0))
    assert (abs(np.bincount(2 * labels[held] + owners[held]) - 10) <= 1).all()
