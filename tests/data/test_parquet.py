"""Parquet in the Hugging Face image convention."""

import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from atoll.core.errors import UserError
from atoll.data import parquet as parquet_module
from atoll.data.options import DataOptions
from atoll.data.parquet import ParquetRecords
from atoll.data.sources import load_data
from tests.data.test_sources import pixels_of
from tests.versions import at_least, since


@pytest.fixture
def images(digits, encode_png):
    return [encode_png(image) for image in digits[0]]


def load(path, **options):
    return load_data(DataOptions("parquet", str(path), image_size=8, channels=1, **options), seed=0)


def test_reads_images_labels_classes_and_columns(tmp_path, images, digits, write_parquet):
    names = {"label": [f"digit {i}" for i in range(10)], "domain": ["ink", "chalk", "pencil"]}
    domain = np.arange(60) % 3
    for split, rows in (("train", slice(0, 45)), ("test", slice(45, 60))):
        columns = {"label": digits[1][rows], "domain": domain[rows], "writer": np.arange(60)[rows] + 500}
        write_parquet(tmp_path / f"{split}.parquet", images[rows], names, **columns)
    splits = load(tmp_path)
    assert np.array_equal(pixels_of(splits.train), digits[0][:45])
    assert np.array_equal(pixels_of(splits.test), digits[0][45:])
    assert splits.train.labels.tolist() == digits[1][:45].tolist()
    assert splits.test.classes == names["label"]
    assert splits.test.columns["domain"].tolist() == domain[45:].tolist()
    assert splits.train.columns["writer"][:3].tolist() == [500, 501, 502]
    assert splits.train.column_values == {"domain": names["domain"]}


@pytest.mark.parametrize(
    "layout", ["train-{}-of-2.parquet", "data/train-{}-of-2.parquet", "train/{}.parquet"]
)
def test_shards_are_one_split_in_the_order_of_their_names(tmp_path, images, digits, write_parquet, layout):
    write_parquet(tmp_path / layout.format(1), images[25:], label=digits[1][25:])
    write_parquet(tmp_path / layout.format(0), images[:25], label=digits[1][:25])
    train = load(tmp_path, test_fraction=0.0).train
    assert np.array_equal(pixels_of(train), digits[0])
    assert train.labels.tolist() == digits[1].tolist()


def test_random_reads_cross_row_groups_and_files(tmp_path, images, write_parquet, monkeypatch):
    files = [
        write_parquet(tmp_path / "a.parquet", images[:25]),
        write_parquet(tmp_path / "b.parquet", images[25:]),
    ]
    records = ParquetRecords(files, "image")
    rows = np.random.default_rng(0).integers(0, 60, 100)
    expected = [images[row] for row in rows]
    assert records.read(rows) == expected
    assert pickle.loads(pickle.dumps(records)).read(rows) == expected
    monkeypatch.setattr(parquet_module, "_HELD_BYTES", 0)  # one row group at a time
    small = ParquetRecords(files, "image")
    assert small.read(rows) == expected
    assert len(small._held) == 1
    assert [records.describe(row) for row in (0, 24, 25, 59)] == [
        "row 0 of a.parquet",
        "row 24 of a.parquet",
        "row 0 of b.parquet",
        "row 34 of b.parquet",
    ]


def test_text_labels_and_a_text_column_match_across_splits(tmp_path, images, write_parquet):
    write_parquet(tmp_path / "train.parquet", images[:3], label=["cat", "dog", "cat"], site=["x", "z", "x"])
    write_parquet(tmp_path / "test.parquet", images[3:5], label=["dog", "ant"], site=["z", "y"])
    splits = load(tmp_path, natural_column="site")
    assert (splits.train.classes, splits.train.labels.tolist()) == (["cat", "dog"], [0, 1, 0])
    assert (splits.test.classes, splits.test.labels.tolist()) == (["cat", "dog", "ant"], [1, 2])
    assert splits.test.columns["site"].tolist() == [1, 2]
    assert splits.test.column_values["site"] == ["x", "z", "y"]
    assert load(tmp_path).train.columns == {}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (pa.int64(), pa.int32()),
        (pa.string(), pa.large_string()),
        pytest.param(pa.string_view(), pa.string_view(), marks=since(pa, 21, reason="writes no views")),
        (pa.dictionary(pa.int8(), pa.string()), pa.dictionary(pa.int32(), pa.string())),
    ],
)
def test_labels_are_read_in_any_type_of_numbers_or_text(tmp_path, images, digits, first, second):
    labels = digits[1] if pa.types.is_integer(first) else [f"digit {label}" for label in digits[1]]
    for shard, (rows, kind) in enumerate(((slice(0, 25), first), (slice(25, 60), second))):
        column = pa.array(labels[rows]).cast(kind)
        binary = pa.binary_view() if at_least(pa, 21) else pa.binary()
        table = pa.table({"image": pa.array(images[rows], binary), "label": column})
        pq.write_table(table, tmp_path / f"train-{shard}.parquet")
    train = load(tmp_path, test_fraction=0.0).train
    assert np.array_equal(pixels_of(train), digits[0])
    assert [train.classes[label] for label in train.labels] == [str(label) for label in labels]


def test_shards_whose_labels_differ_in_kind_get_a_sentence(tmp_path, images):
    for shard, label in enumerate((3, "three")):
        pq.write_table(pa.table({"image": images[:1], "label": [label]}), tmp_path / f"train-{shard}.parquet")
    with pytest.raises(UserError, match=r"split of train-0\.parquet have columns of different types .*int64"):
        load(tmp_path)


def test_shards_that_number_classes_otherwise_are_refused(tmp_path, images, write_parquet):
    """Class 0 would be the cats of one and the dogs of another; a shard without names has the numbers of others."""
    for shard, names in enumerate((["cat", "dog"], None, ["dog", "cat"])):
        write_parquet(
            tmp_path / f"train-{shard}.parquet", images[:4], names and {"label": names}, label=[0, 1, 0, 1]
        )
    with pytest.raises(
        UserError, match=r"train-2\.parquet numbers .* 'label' otherwise than train-0\.parquet"
    ):
        load(tmp_path)
    write_parquet(tmp_path / "train-2.parquet", images[:4], {"label": ["cat", "dog"]}, label=[0, 1, 0, 1])
    assert load(tmp_path).train.classes == ["cat", "dog"]


def test_val_stands_in_for_test_and_other_names_are_options(tmp_path, images, write_parquet):
    for split, rows in (("train", slice(0, 5)), ("val", slice(5, 9)), ("extra", slice(9, 12))):
        write_parquet(tmp_path / f"{split}.parquet", images[rows])
    assert len(load(tmp_path).test) == 4
    assert len(load(tmp_path, test_split="extra").test) == 3
    assert len(load(tmp_path, train_split="extra").train) == 3
    assert load(tmp_path).train.labels is None
    for option in ({"train_split": "trian"}, {"test_split": "tset"}):
        with pytest.raises(UserError, match=next(iter(option.values()))):
            load(tmp_path, **option)
    with pytest.raises(UserError, match="one file"):
        load(tmp_path / "train.parquet", test_split="val")


def test_plain_bytes_and_paths_are_images_too(tmp_path, images, digits):
    pq.write_table(pa.table({"scan": pa.array(images, pa.binary())}), tmp_path / "bytes.parquet")
    assert np.array_equal(pixels_of(load(tmp_path / "bytes.parquet", test_fraction=0.0).train), digits[0])
    (tmp_path / "one.png").write_bytes(images[7])
    cells = pa.array(
        [{"bytes": None, "path": "one.png"}], pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    )
    pq.write_table(pa.table({"image": cells}), tmp_path / "paths.parquet")
    assert np.array_equal(
        pixels_of(load(tmp_path / "paths.parquet", test_fraction=0.0).train)[0], digits[0][7]
    )


def test_a_corrupt_row_is_named(tmp_path, images, write_parquet):
    path = write_parquet(tmp_path / "a.parquet", [*images[:12], b"", *images[13:20]])
    with pytest.raises(UserError, match=r"row 12 of a\.parquet \(it is empty\)"):
        load(path, test_fraction=0.0)


def test_a_text_file_is_no_parquet(tmp_path):
    (tmp_path / "train.parquet").write_text("sepal,petal\n1,2\n")
    with pytest.raises(UserError, match=r"train\.parquet is not a readable Parquet file"):
        load(tmp_path)


def test_a_damaged_row_group_is_named(tmp_path, images, write_parquet):
    path = write_parquet(tmp_path / "a.parquet", images)
    data = bytearray(path.read_bytes())
    offset = pq.ParquetFile(path).metadata.row_group(3).column(0).dictionary_page_offset
    data[offset or pq.ParquetFile(path).metadata.row_group(3).column(0).data_page_offset] ^= 0xFF
    path.write_bytes(bytes(data))
    with pytest.raises(UserError, match=r"a\.parquet is damaged in row group 3"):
        load(path, test_fraction=0.0)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"image_column": "img"}, r"no column 'img' \(data.image_column\); did you mean 'image'"),
        ({"image_column": "label"}, "'label' does not hold images"),
        ({"label_column": "lable"}, "did you mean 'label'"),
        ({"natural_column": "sight"}, "no column 'sight'"),
        ({"label_column": "score"}, "labels must be integers or text"),
        ({"natural_column": "score"}, "clients and labels must be integers or text"),
        (
            {"label_column": "gaps"},
            r"'gaps' is empty for row 1 of a\.parquet \(1 such row\); give each a value",
        ),
    ],
)
def test_wrong_columns_get_a_sentence(tmp_path, images, write_parquet, options, sentence):
    columns = {"label": [0, 1, 2], "score": [0.1, 0.2, 0.3], "gaps": [1, None, 2]}
    path = write_parquet(tmp_path / "a.parquet", images[:3], **columns)
    with pytest.raises(UserError, match=sentence):
        load(path, test_fraction=0.0, **options)


def test_labels_outside_the_named_classes_are_refused(tmp_path, images, write_parquet):
    path = write_parquet(tmp_path / "a.parquet", images[:3], {"label": ["a", "b"]}, label=[0, -1, 1])
    with pytest.raises(UserError, match=r"'label' is -1 for row 1 of a\.parquet, outside 0 to 1"):
        load(path, test_fraction=0.0)


@pytest.mark.parametrize("label", [[-1, -1, -1], [None, None, None]])
def test_labels_that_are_not_read_are_not_looked_at(tmp_path, images, write_parquet, label):
    path = write_parquet(
        tmp_path / "a.parquet", images[:3], {"label": ["a", "b"]}, label=label, site=[4, 5, 5]
    )
    train = load(path, test_fraction=0.0, labels=False).train
    assert train.labels is None
    assert {name: column.tolist() for name, column in train.columns.items()} == {"site": [4, 5, 5]}
    with pytest.raises(UserError, match="'label' is"):
        load(path, test_fraction=0.0)


def test_nothing_to_learn_from_is_refused(tmp_path, images, write_parquet):
    pq.write_table(pa.table({"label": [1, 2]}), tmp_path / "bare.parquet")
    with pytest.raises(UserError, match="no column of images"):
        load(tmp_path / "bare.parquet")
    with pytest.raises(UserError, match="holds no images"):
        load(write_parquet(tmp_path / "empty.parquet", []))
    with pytest.raises(UserError, match=r"no Parquet file of the split 'train' .*bare\.parquet"):
        load(tmp_path)
    write_parquet(tmp_path / "train-0.parquet", images[:2], label=[0, 1])
    write_parquet(tmp_path / "train-1.parquet", images[2:4])
    with pytest.raises(UserError, match="other columns"):
        load(tmp_path)


def test_integers_without_names_are_their_own_names(tmp_path, images, write_parquet):
    train = load(
        write_parquet(tmp_path / "a.parquet", images[:4], label=[7, 3, 7, 9]), test_fraction=0.0
    ).train
    assert (train.labels.tolist(), train.classes) == ([1, 0, 1, 2], ["3", "7", "9"])


@pytest.mark.parametrize("named", ["train", "test"])
def test_names_of_one_split_hold_for_numbers_without_names_in_the_other(
    tmp_path, images, digits, write_parquet, named
):
    names = [f"digit {i}" for i in range(10)]
    for split, rows in (("train", slice(0, 45)), ("test", slice(45, 60))):
        known = {"label": names} if split == named else None
        write_parquet(tmp_path / f"{split}.parquet", images[rows], known, label=digits[1][rows])
    splits = load(tmp_path)
    for split, labels in ((splits.train, digits[1][:45]), (splits.test, digits[1][45:])):
        assert split.classes == names
        assert split.labels.tolist() == labels.tolist()
    outside = digits[1][45:] + 1
    outside[3] = 10
    write_parquet(
        tmp_path / "test.parquet", images[45:], {"label": names} if named == "test" else None, label=outside
    )
    with pytest.raises(
        UserError,
        match=r"test\.parquet: column 'label' is 10 for row 3 of test\.parquet.*named \(digit 0, digit 1",
    ):
        load(tmp_path)


@pytest.mark.slow
def test_cifar10_bit_for_bit(real_data):
    import io

    from PIL import Image

    splits = load_data(DataOptions("parquet", str(real_data / "cifar10")), seed=0)
    assert splits.train.images.shape == (50000, 3, 32, 32)
    assert torch.bincount(splits.train.labels).tolist() == [5000] * 10
    assert torch.bincount(splits.test.labels).tolist() == [1000] * 10
    assert splits.train.classes[:2] == ["airplane", "automobile"]
    table = pq.read_table(real_data / "cifar10" / "train.parquet")
    for row in (0, 12345, 49999):
        opened = Image.open(io.BytesIO(table["image"][row].as_py()["bytes"])).convert("RGB")
        stored = splits.train.images.gather(torch.tensor([row]))[0].permute(1, 2, 0).numpy()
        assert np.array_equal(stored, np.asarray(opened))


@pytest.mark.slow
def test_pacs_streams_as_it_is_stored_and_has_its_domains(real_data):
    path = str(real_data / "pacs")
    stored = load_data(DataOptions("parquet", path, image_size=64), seed=0).train
    streamed = load_data(DataOptions("parquet", path, image_size=64, memory_gib=0.01), seed=0).train
    assert stored.column_values["domain"] == ["art_painting", "cartoon", "photo", "sketch"]
    assert torch.bincount(stored.columns["domain"]).tolist() == [1638, 1875, 1337, 3143]
    some = torch.randperm(len(stored), generator=torch.Generator().manual_seed(0))[:500]
    assert torch.equal(stored.images.gather(some), streamed.images.gather(some))


def test_a_program_in_place_of_an_image_is_not_run(tmp_path, images, digits, write_parquet, monkeypatch):
    monkeypatch.setattr(
        "PIL.EpsImagePlugin.Ghostscript", lambda *_, **__: pytest.fail("Ghostscript was started")
    )
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
    rows = [*images[:44], eps]
    write_parquet(
        tmp_path / "train.parquet", rows, {"label": [str(i) for i in range(10)]}, label=digits[1][:45]
    )
    with pytest.raises(UserError, match=r"in no format that is read"):
        load(tmp_path)


def test_image_files_that_cells_name_are_part_of_the_fingerprint(tmp_path, images, write_parquet):
    for i, image in enumerate(images[:4]):
        (tmp_path / f"{i}.png").write_bytes(image)
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    cells = [{"bytes": None, "path": f"{i}.png"} for i in range(3)] + [{"bytes": images[3], "path": "3.png"}]
    pq.write_table(pa.table({"image": pa.array(cells, kind)}), tmp_path / "train.parquet")
    before = load(tmp_path, test_fraction=0).train
    (tmp_path / "1.png").write_bytes(images[9])
    after = load(tmp_path, test_fraction=0).train
    assert before.fingerprint != after.fingerprint
    assert np.array_equal(pixels_of(after)[1], pixels_of(load_whole(images, 9, tmp_path, write_parquet))[0])


def load_whole(images, row, folder, write_parquet):
    """One image, read from a cell that holds it."""
    return load(write_parquet(folder / "one.parquet", [images[row]], {}), test_fraction=0).train


@pytest.mark.parametrize("sites", [None, [None, "a"]])
def test_a_pooled_test_set_need_not_say_whose_its_images_are(tmp_path, images, sites):
    def write(split, rows, site):
        columns = {"image": [{"bytes": one, "path": None} for one in rows], "label": [0, 1]}
        pq.write_table(pa.table(columns | ({"site": site} if site else {})), tmp_path / f"{split}.parquet")

    write("train", images[:2], ["a", "b"])
    write("test", images[2:4], sites)
    splits = load(tmp_path, natural_column="site")
    assert splits.train.column_values["site"] == ["a", "b"]
    assert "site" not in splits.test.columns
