"""Pictures of clients: which are chosen, that the images are theirs, and what the SVG and the page say."""

import base64
import io
import re
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image

from atoll.data.images import ImageSet, StoredPixels
from atoll.data.options import PartitionOptions
from atoll.data.partition.make import make_partition
from atoll.report.client_pictures import (
    IMAGES,
    MAX_CLIENTS,
    client_samples,
    clients_picture,
    samples_table,
    strip,
)

SVG = "{http://www.w3.org/2000/svg}"


def clients(count, images=400, side=8, **options):
    labels, chosen = torch.arange(images) % 4, PartitionOptions(clients=count, **{"kind": "iid", **options})
    partition = make_partition(chosen, labels, {}, images, 0, classes=("a", "b", "c", "d"))
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (images, 3, side, side), dtype=torch.uint8, generator=generator)
    return ImageSet(StoredPixels(pixels), labels), partition, pixels


def decoded(uri):
    data = base64.b64decode(uri.removeprefix("data:image/png;base64,"))
    return torch.from_numpy(np.array(Image.open(io.BytesIO(data))))


def test_samples_are_the_clients_own_images():
    images, partition, pixels = clients(5)
    samples = client_samples(images, partition)
    assert (samples["clients"], samples["of"]) == ([0, 1, 2, 3, 4], 5)
    for k, pictures in enumerate(samples["pictures"]):
        expected = pixels[partition.clients[k][torch.arange(8) * 10]]  # 80 images each
        assert torch.equal(pictures, expected)
        shown = decoded(strip(pictures)).reshape(8, IMAGES, 8, 3).permute(1, 3, 0, 2)
        assert torch.equal(shown, expected)


def test_small_clients_large_images_and_grey_ones():
    images, partition, _ = clients(40, images=60, side=96)
    samples = client_samples(images, partition)
    assert {tuple(pictures.shape) for pictures in samples["pictures"]} == {(1, 3, 48, 48), (2, 3, 48, 48)}
    assert decoded(strip(torch.zeros(2, 1, 4, 4, dtype=torch.uint8))).shape == (4, 8)
    assert strip(torch.zeros(0, 3, 4, 4, dtype=torch.uint8)) == ""


def bars(picture):
    root = ElementTree.fromstring(picture)
    assert root.tag == f"{SVG}svg"
    return [one for one in root.iter(f"{SVG}rect") if one.get("height") == "14"], root


def test_the_picture_has_sizes_labels_distance_and_shifts():
    images, partition, _ = clients(3, kind="dirichlet", alpha=0.5, min_size=1)
    partition = replace(partition, shifts=("rotated by 0°", "rotated by 120°", "rotated by 240°"))
    found, root = bars(clients_picture(partition, client_samples(images, partition), "mine"))
    longest = max(partition.sizes)
    length = sum(float(one.get("width")) for one in found)
    assert length == pytest.approx(220 * sum(partition.sizes) / longest, abs=0.5)
    assert len(found) == (partition.counts > 0).sum()
    words = [text.text for text in root.iter(f"{SVG}text")]
    assert "mine" in words
    assert {"rotated by 120°", f"distance {partition.distances()[1]:.2f}"} <= set(words)
    assert any(f"label distance {partition.label_distance:.3f}" in word for word in words)
    assert len(list(root.iter(f"{SVG}image"))) == 3


def test_of_many_clients_some_are_drawn_and_it_says_so():
    images, partition, _ = clients(200)
    samples = client_samples(images, partition)
    assert samples["clients"] == list(range(0, 200, 5))
    picture = clients_picture(partition, samples, "many")
    assert f"shown: {MAX_CLIENTS} of 200 clients, at equal distances" in picture
    assert len(list(bars(picture)[1].iter(f"{SVG}image"))) == MAX_CLIENTS
    table = samples_table(partition.names, (), samples, "many")
    assert f"{MAX_CLIENTS} of 200 clients" in table
    assert len(re.findall("<img ", table)) == MAX_CLIENTS


def test_without_labels_a_bar_is_one_piece():
    images, partition, _ = clients(4)
    partition = replace(partition, counts=None, classes=())
    found, _ = bars(clients_picture(partition, client_samples(images, partition), "unlabelled"))
    assert [float(one.get("width")) for one in found] == [220.0] * 4


def test_names_are_escaped():
    images, partition, _ = clients(2)
    partition = replace(partition, names=["<b>&", "two"])
    picture = clients_picture(partition, client_samples(images, partition), "<script>")
    assert "<script>" not in picture
    ElementTree.fromstring(picture)
