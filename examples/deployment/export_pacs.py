"""Export PACS as folders of four sites: FOLDER/DOMAIN/train/CLASS/*.jpg and FOLDER/DOMAIN/test/CLASS/*.jpg.

    python export_pacs.py FOLDER [IMAGES]

The script reads $ATOLL_DATA/pacs/{train,test}.parquet. IMAGES limits the number of images per domain and split.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq

DOMAINS = ("art_painting", "cartoon", "photo", "sketch")


def main(folder: Path, limit: int | None) -> None:
    """Write the bytes of each image without changing them."""
    source = os.environ.get("ATOLL_DATA")
    if not source:
        sys.exit("set ATOLL_DATA to the folder that holds pacs/train.parquet and pacs/test.parquet")
    for split in ("train", "test"):
        table = pq.read_table(Path(source) / "pacs" / f"{split}.parquet")
        about = json.loads(table.schema.metadata[b"huggingface"])["info"]["features"]
        classes = about["label"]["names"]
        written: Counter[str] = Counter()
        for row in table.to_pylist():
            domain, label = DOMAINS[row["domain"]], classes[row["label"]]
            if limit is not None and written[domain] >= limit:
                continue
            place = folder / domain / split / label
            place.mkdir(parents=True, exist_ok=True)
            (place / f"{written[domain]:05d}.jpg").write_bytes(row["image"]["bytes"])
            written[domain] += 1
        print(split, dict(written))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)
