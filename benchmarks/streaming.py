"""Rate at which images of a folder larger than memory are read, decoded and resized, without training.

    python benchmarks/streaming.py [--json FILE]

JPEGs of 500 × 375 pixels at quality 90, cut at random from scikit-learn's two photographs, become batches of 64
images of 224 pixels, through the reader that training uses: in this process, and in one and two processes of their
own. The processes start, and read one batch, before the time begins. The readers take turns.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images

from atoll.data.cache import StreamedPixels
from atoll.data.decode import Decoding
from atoll.data.decode_workers import DecodeWorkers
from atoll.data.records import FileRecords
from measured import write

IMAGES, BATCH, SIZE, ROUNDS = 1024, 64, 224, 5
COUNTS = (0, 1, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        names = write_images(Path(folder))
        size = sum((Path(folder) / name).stat().st_size for name in names) / IMAGES
        pixels = StreamedPixels(FileRecords(Path(folder), names), Decoding(SIZE, 3))
        readers = {count: DecodeWorkers(pixels, count) for count in COUNTS}
        for reader in readers.values():
            list(reader.read([torch.arange(BATCH)]))
        rates: dict[int, list[float]] = {count: [] for count in COUNTS}
        for _ in range(ROUNDS):
            for count, reader in readers.items():
                begun = time.perf_counter()
                read = sum(len(batch) for batch in reader.read(torch.split(torch.arange(IMAGES), BATCH)))
                rates[count].append(read / (time.perf_counter() - begun))
    read_by = {
        str(count): {"median": round(statistics.median(found)), "all": [round(rate) for rate in found]}
        for count, found in rates.items()
    }
    print(read_by)
    write(options.json, {"seed": 0, "bytes_an_image": round(size), "images_a_second": read_by}, ("pillow",))


def write_images(folder: Path) -> tuple[str, ...]:
    """Write the JPEGs; their names."""
    photographs, draws = load_sample_images().images, np.random.default_rng(0)
    names = tuple(f"{i:04}.jpg" for i in range(IMAGES))
    for i, name in enumerate(names):
        height, width, _ = photographs[i % 2].shape
        top, left = draws.integers(0, height - 375), draws.integers(0, width - 500)
        picture = photographs[i % 2][top : top + 375, left : left + 500]
        Image.fromarray(picture).save(folder / name, quality=90)
    return names


if __name__ == "__main__":
    main()
