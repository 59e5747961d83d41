"""The public image sets that the papers use: how many images each has, and copies that are known to differ."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from atoll.core.errors import UserError
from atoll.data.options import DataOptions
from atoll.data.records import Listing
from atoll.data.sources import read_listings


@dataclass(frozen=True)
class PublicSet:
    """A public set of images.

    Attributes:
        train: Number of its training images.
        test: Number of its test images.
        jpeg: Whether its images are stored as JPEG; otherwise such a copy has lost some of the pixels.
        copies: Copies that differ from it, in words, by the digest of their training images.
    """

    train: int
    test: int
    jpeg: bool = False
    copies: dict[str, str] = field(default_factory=dict)


_CIFAR10 = PublicSet(
    50_000, 10_000, copies={"03bcf95dc9db562036c5d83e14d58e42": "the JPEG copy of quality 75 (YoongiKim)"}
)
PUBLIC_SETS = {  # by the last part of data.path
    "cifar10": _CIFAR10,
    "CIFAR10": _CIFAR10,
    "CIFAR100": PublicSet(50_000, 10_000),
    "STL10": PublicSet(5_000, 8_000),
    "tiny-imagenet": PublicSet(
        100_000,
        10_000,
        jpeg=True,
        copies={"0ce89a6d1cbb927e736636e942d5a7f2": "the first 150 training images of each class"},
    ),
    "imagenet-100": PublicSet(126_689, 5_000, jpeg=True),  # the classes of Contrastive Multiview Coding
    "mini-imagenet": PublicSet(50_000, 10_000, jpeg=True),  # as FedCA divides it
}
JPEG = b"\xff\xd8"


def image_changes(data: DataOptions) -> dict[str, str]:
    """How images on this machine differ from the public set that the papers use: a key and words for each.

    Sets that are not here, or that are no public set, give nothing.
    """
    name = Path(data.path or "").name
    public = PUBLIC_SETS.get(name)
    if public is None:
        return {}
    try:
        train, test = read_listings(data, download=False)
    except UserError:
        return {}
    found = {}
    for split, listing, count in (("training", train, public.train), ("test", test, public.test)):
        have = 0 if listing is None else len(listing)
        if have != count:
            found[f"{split} images of {name}"] = f"{have:,}; in the paper's setting {count:,}"
    copy = public.copies.get(train.records.digest(), "")
    if not copy and not public.jpeg and _is_jpeg(train):
        copy = "a JPEG copy"
    if copy:
        found[f"copy of {name}"] = f"{copy}; in the paper's setting the original"
    return found


def _is_jpeg(listing: Listing) -> bool:
    (first,) = listing.records.read(np.zeros(1, dtype=np.int64))
    return isinstance(first, bytes) and first.startswith(JPEG)
