"""Real digits as files of every kind, and a cache of the test's own."""

import io
import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from sklearn.datasets import load_digits


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("ATOLL_CACHE", str(folder))
    monkeypatch.delenv("ATOLL_DATA", raising=False)
    return folder


@pytest.fixture(scope="session")
def digits():
    """((60, 8, 8) uint8 images, labels): the first 60 digits."""
    data = load_digits()
    return np.rint(data.images[:60] * (255 / 16)).astype(np.uint8), data.target[:60]


def png(pixels, mode=None):
    out = io.BytesIO()
    image = Image.fromarray(pixels)
    (image if mode is None else image.convert(mode)).save(out, "PNG")
    return out.getvalue()


@pytest.fixture(scope="session")
def encode_png():
    return png


@pytest.fixture
def write_parquet():
    """Writes image files and columns in the Hugging Face convention, 10 rows to a row group."""

    def write(path, images, names=None, **columns):
        cells = [{"bytes": data, "path": f"{i}.png"} for i, data in enumerate(images)]
        kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        table = pa.table({"image": pa.array(cells, kind), **columns})
        features = {name: {"names": values, "_type": "ClassLabel"} for name, values in (names or {}).items()}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path, row_group_size=10)
        return path

    return write


DATA = os.environ.get("ATOLL_DATA")  # as it was before the fixture above hid it


@pytest.fixture(scope="session")
def real_data():
    """The folder that holds ``cifar10`` and ``pacs`` as Parquet; only slow tests ask for it."""
    if DATA is None:
        pytest.skip("set ATOLL_DATA to the folder of data sets")
    return Path(DATA)
