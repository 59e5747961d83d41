"""Pictures of the clients' data: sizes, labels, distance, and sample images as the clients have them.

``atoll data`` draws them for a recipe, and a run keeps the samples for its report.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from atoll.core.text import plural
from atoll.core.tree import Tree
from atoll.data.images import ImageSet
from atoll.data.partition.partition import Partition
from atoll.report.html import Html, join, table, tag
from atoll.report.pictures import data_uri, thumbnails
from atoll.report.svg import MUTED, picture, text

FILE = "clients.safetensors"  # in a run's folder
MAX_CLIENTS = 40  # in a picture; of more clients, this number is chosen at equal distances
IMAGES = 8  # of each client
THUMBNAIL = 48  # largest side of a sample image in pixels
ROW = 44  # height of a client's row
NAME, BAR, WORDS = 130, 240, 190  # widths of a row's parts


def client_samples(images: ImageSet, partition: Partition) -> Tree:
    """Choose clients, and sample images of each: at equal distances in the order of the client's images.

    Args:
        images: The training images as the clients have them.
        partition: The images of each client.

    Returns:
        ``clients``: the chosen clients; ``of``: the number of all; ``pictures``: the images of each, uint8
        (n, C, h, w).
    """
    chosen = chosen_clients(partition)
    pictures = [_pictures(images, partition.clients[k]) for k in chosen]
    return {"clients": chosen, "of": len(partition), "pictures": pictures}


def chosen_clients(partition: Partition) -> list[int]:
    """Choose at most `MAX_CLIENTS` clients, at equal distances in their order."""
    count = min(len(partition), MAX_CLIENTS)
    return [k * len(partition) // count for k in range(count)]


def _pictures(images: ImageSet, indices: Tensor) -> Tensor:
    count = min(len(indices), IMAGES)
    return thumbnails(images.images.gather(indices[torch.arange(count) * len(indices) // count]), THUMBNAIL)


def strip(pictures: Tensor) -> str:
    """Data URI of a PNG of images side by side; empty if there are none.

    Shape:
        pictures: uint8 (n, C, h, w).
    """
    n, channels, height, width = pictures.shape
    if n == 0:
        return ""
    return data_uri(pictures.permute(2, 0, 3, 1).reshape(height, n * width, channels))


def shown_words(samples: Tree) -> str:
    """Say which clients are shown, if not all are."""
    shown, of = len(samples["clients"]), samples["of"]
    return "" if shown == of else f"{shown} of {plural(of, 'client')}, at equal distances in their order"


def samples_table(names: Sequence[str], shifts: Sequence[str], samples: Tree, label: str) -> Html:
    """Table of the sample images, for a page.

    Args:
        names: Names of all clients.
        shifts: Shifts of all clients in words; empty for none.
        samples: The result of `client_samples`.
        label: Name of the runs that share them.
    """
    body = [
        [
            names[k],
            *([shifts[k]] if shifts else []),
            tag("td", tag("img", src=strip(pictures), alt=f"images of client {names[k]}", height="40")),
        ]
        for k, pictures in zip(samples["clients"], samples["pictures"], strict=True)
    ]
    more = f"; {shown_words(samples)}" if shown_words(samples) else ""
    head = ["client", *(["shift"] if shifts else []), "images"]
    return table(f"Sample images as the clients have them, before the views: {label}{more}", head, body)


def clients_picture(partition: Partition, samples: Tree, title: str, words: str = "") -> str:
    """Draw clients as SVG: a row each, with its size by class, label distance, shift and sample images.

    Args:
        partition: The images of each client, with the shifts in words.
        samples: The result of `client_samples`.
        title: Heading.
        words: Description of the images and their partition, below the heading.
    """
    distances = partition.distances()
    largest = max(partition.sizes)
    side = ROW - 6
    width = 20 + NAME + BAR + WORDS + IMAGES * side + 20
    facts = [line for line in (words, _facts(partition, samples)) if line]
    parts = [text(20, 30, title, 17)]
    parts += [text(20, 50 + 18 * place, line, 12, fill=MUTED) for place, line in enumerate(facts)]
    legend, top = _legend(partition, width, 56 + 18 * len(facts))
    parts.append(legend)
    for row, (k, pictures) in enumerate(zip(samples["clients"], samples["pictures"], strict=True)):
        y = top + row * ROW
        size = partition.sizes[k]
        parts += [
            text(20, y + 17, _cut(partition.names[k]), 13),
            text(20, y + 33, plural(size, "image"), 11, fill=MUTED),
        ]
        length = (BAR - 20) * size / largest
        bars = [
            counts[k].tolist()
            for counts in (partition.counts, partition.cluster_counts)
            if counts is not None
        ]
        for place, counts in enumerate(bars or [[size]]):
            parts.append(_bar(20 + NAME, y + 6 + 16 * place, length, counts, hollow=place == 1))
        lines = [f"distance {distances[k]:.2f}"] if distances else []
        lines += partition.shifts[k].split(", ") if partition.shifts else []
        for place, word in enumerate(lines):
            parts.append(text(20 + NAME + BAR, y + 10 + 10 * place, word, 10, fill=MUTED))
        left = 20 + NAME + BAR + WORDS
        box = {"x": f"{left}", "y": f"{y}", "width": f"{len(pictures) * side}", "height": f"{side}"}
        if len(pictures):
            parts.append(tag("image", href=strip(pictures), preserveAspectRatio="none", **box))
    height = top + len(samples["clients"]) * ROW + 16
    return picture(width, height, parts)


def _facts(partition: Partition, samples: Tree) -> str:
    facts = [plural(len(partition), "client"), f"{plural(sum(partition.sizes), 'image')}"]
    if partition.label_distance is not None:
        facts.append(f"label distance {partition.label_distance:.3f}")
    if shown_words(samples):
        facts.append(f"shown: {shown_words(samples)}")
    return "; ".join(facts)


def _legend(partition: Partition, width: int, y: int) -> tuple[Html, int]:
    """Names of the classes, at most 30, and the height at which the rows begin."""
    if partition.counts is None:
        return Html(""), y
    names = [*partition.classes, *map(str, range(len(partition.classes), partition.counts.shape[1]))]
    parts, x = [], 20
    for c, name in enumerate(names[:30]):
        word = _cut(name)
        if x + 30 + 7 * len(word) > width:
            x, y = 20, y + 16
        parts.append(tag("rect", x=f"{x}", y=f"{y - 9}", width="10", height="10", fill=_colour(c)))
        parts.append(text(x + 14, y, word, 11, fill=MUTED))
        x += 30 + 7 * len(word)
    if len(names) > 30:
        parts.append(text(x, y, f"and {len(names) - 30} more", 11, fill=MUTED))
    if partition.cluster_counts is not None:
        y += 16
        words = f"lower bars: the {partition.cluster_counts.shape[1]} feature clusters that are split"
        parts.append(text(20, y, words, 11, fill=MUTED))
    return join(parts), y + 16


def _bar(x: float, y: float, length: float, counts: Sequence[int], hollow: bool) -> Html:
    total = max(1, sum(counts))
    parts = []
    for c, count in enumerate(counts):
        if count:
            part = length * count / total
            size = {
                "x": f"{x:.1f}",
                "y": f"{y:.1f}",
                "width": f"{part:.2f}",
                "height": "8" if hollow else "14",
            }
            parts.append(tag("rect", **size, fill=_colour(c), opacity="0.55" if hollow else ""))
            x += part
    return join(parts)


def _colour(c: int) -> str:
    """Colour of a class: hues at the golden angle, so that neighbours differ."""
    return f"hsl({np.round(c * 137.508 % 360):.0f},{55 if c % 2 else 65}%,{45 + 12 * (c // 10 % 2)}%)"


def _cut(name: str) -> str:
    return name if len(name) <= 16 else f"{name[:15]}…"
