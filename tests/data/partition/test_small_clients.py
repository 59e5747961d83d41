"""Clients that are too small to train: who sits out, and what is said of them."""

import pytest
import torch

from atoll.core.errors import UserError
from atoll.data.images import ImageSet, StoredPixels
from atoll.data.options import PartitionOptions
from atoll.data.partition.make import partition_images
from atoll.data.partition.partition import Partition
from atoll.data.partition.small_clients import sit_out_words, too_small_words


def test_small_clients_sit_out_named_and_counted(recwarn):
    labels = torch.tensor([0] * 6 + [1] * 3 + [2])
    images = ImageSet(StoredPixels(torch.zeros(10, 3, 4, 4, dtype=torch.uint8)), labels, ("a", "b", "c"))
    whole, options = PartitionOptions(kind="single-class", clients=3), {"kind": "single-class", "clients": 3}
    everyone = partition_images(images, whole, seed=0)
    assert (everyone.sizes, everyone.sit_out, len(recwarn)) == ([6, 3, 1], {}, 0)
    rest = partition_images(images, PartitionOptions(**options, sit_out_below=2), seed=0)
    assert (rest.names, rest.sizes, rest.sit_out) == (["0", "1"], [6, 3], {"2": 1})
    assert [indices.tolist() for indices in rest.clients] == [list(range(6)), list(range(6, 9))]
    assert rest.counts.tolist() == [[6, 0, 0], [0, 3, 0]]
    # By hand, over the nine images that train: |1 − 6/9| + |0 − 3/9| and |0 − 6/9| + |1 − 3/9|.
    assert rest.distances() == pytest.approx([2 / 3, 4 / 3])
    assert rest.label_distance == pytest.approx((2 / 3 + 4 / 3) / 2)
    assert str(recwarn.pop().message) == "1 client is too small to train and sits out: 2 (1 image)"
    said = "2 clients are too small to train and sit out: 1 (3 images), 2 (1 image)"
    assert sit_out_words({"1": 3, "2": 1}) == said
    assert too_small_words(dict.fromkeys("01234", 1)) == (
        "5 clients are too small to train: 0 (1 image), 1 (1 image), 2 (1 image) and 2 more"
    )
    again = Partition.from_json(rest.to_json())
    assert (again.sit_out, again.sizes, again.names) == (rest.sit_out, rest.sizes, rest.names)
    with pytest.raises(UserError, match="all 3 clients have fewer than 7 images"):
        partition_images(images, PartitionOptions(**options, sit_out_below=7), seed=0)


def test_a_natural_client_without_a_training_image_sits_out_where_the_recipe_says_so(recwarn):
    """Its only image is held out."""
    images = ImageSet(
        StoredPixels(torch.zeros(5, 3, 4, 4, dtype=torch.uint8)),
        torch.tensor([0, 1, 0, 1, 0]),
        ("a", "b"),
        columns={"client": torch.tensor([0, 0, 2, 2, 2])},
        column_values={"client": ("north", "east", "south")},
    )
    with pytest.raises(
        UserError, match=r"'east' with 0 .* let such clients sit out: partition.sit_out_below"
    ):
        partition_images(images, PartitionOptions(kind="natural"), seed=0)
    asked = PartitionOptions(kind="natural", sit_out_below=2, min_size=1)
    with pytest.raises(UserError, match=r"fewer than 1; lower partition\.min_size"):
        partition_images(images, asked, seed=0)
    rest = partition_images(images, PartitionOptions(kind="natural", sit_out_below=2), seed=0)
    assert (rest.names, rest.sizes, rest.sit_out) == (["north", "south"], [2, 3], {"east": 0})
    assert str(recwarn.pop().message) == "1 client is too small to train and sits out: east (0 images)"
