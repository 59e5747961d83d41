"""Client-local tests, on labels and features with a known answer."""

import pytest
import torch
from torch import nn

from atoll.core.errors import UserError
from atoll.data.images import ImageSet, StoredPixels
from atoll.data.views.views import ViewOptions, make_views
from atoll.evaluation import EvaluationOptions, client_accuracies, evaluate, mean_over_clients, split_test
from atoll.evaluation.client_tests import by_client


def images(labels, **columns):
    """Images of which the pixel of the class is white."""
    labels = torch.as_tensor(labels)
    pixels = torch.zeros(len(labels), 1, 4, 4, dtype=torch.uint8)
    pixels.flatten(1)[torch.arange(len(labels)), labels] = 255
    return ImageSet(StoredPixels(pixels), labels, [str(c) for c in range(4)], columns)


def split(train, test, clients, column=None, seed=0):
    return split_test(train, test, torch.as_tensor(clients), column, torch.Generator().manual_seed(seed))


def test_clients_with_separate_classes_are_tested_on_their_classes():
    train, test = images([0, 1, 2, 3, 0, 2]), images([3, 2, 1, 0] * 5)
    shares = split(train, test, [0, 0, 1, 1, 0, 1])
    for client, classes in ((0, {0, 1}), (1, {2, 3})):
        assert set(test.labels[shares[client]].tolist()) == classes
    assert sorted(torch.cat(list(shares.values())).tolist()) == list(range(20))


def test_a_class_is_split_as_its_training_images_are():
    draws = torch.Generator().manual_seed(1)
    train, test = (images(torch.randint(4, (size,), generator=draws)) for size in (300, 500))
    clients = torch.randint(-1, 6, (300,), generator=draws)
    shares = split(train, test, clients)
    assert sorted(torch.cat(list(shares.values())).tolist()) == list(range(500))
    for label in range(4):
        held = [int(((clients == k) & (train.labels == label)).sum()) for k in range(6)]
        for client in range(6):
            quota = held[client] / sum(held) * int((test.labels == label).sum())
            assert abs(int((test.labels[shares[client]] == label).sum()) - quota) < 1


def test_rounding_favours_no_client():
    """100 equal clients and 30 test images of each of 4 classes: 1.2 images for each client."""
    train = images(torch.arange(4).repeat(100))
    shares = split(train, images(torch.arange(4).repeat(30)), torch.arange(400) // 4)
    sizes = [len(shares.get(client, ())) for client in range(100)]
    assert sum(sizes) == 120
    assert {*sizes} == {1, 2}


def test_a_whole_share_is_not_rounded():
    """Client 1 is owed 4/9 of an image of class 0; of class 1 its share is 1, the others have 0.6 and 0.4."""
    train = images([0] * 9 + [1] * 10)
    test = images([0, 1, 1])
    shares = split(train, test, [0] * 5 + [1] * 4 + [0] * 3 + [1] * 5 + [2] * 2)
    assert sorted(torch.cat(list(shares.values())).tolist()) == [0, 1, 2]
    assert test.labels[shares[1]].tolist() == [1]


def test_a_client_without_images_of_a_class_never_receives_one_of_its_test_images():
    train = images([0] * 7 + [1] * 9)
    shares = split(train, images([0] * 5 + [1] * 5), [0, 1, 2, 0, 1, 2, 0] + [3] * 9)
    assert torch.equal(shares[3], torch.arange(5, 10))


def test_domains_count_if_they_determine_the_clients():
    train = images([0, 0, 0, 0], domain=torch.tensor([0, 0, 1, 1]))
    test = images([0, 0, 0, 0], domain=torch.tensor([1, 0, 1, 0]))
    shares = split(train, test, [0, 0, 1, 1], "domain")
    assert (shares[0].tolist(), shares[1].tolist()) == ([1, 3], [0, 2])
    assert (
        len(split(train, images([0] * 4), [0, 0, 1, 1], "domain")[0]) == 2
    )  # the test images have no domain


def test_images_that_nobody_could_know_are_in_no_share():
    shares = split(images([0, 1]), images([0, 1, 2]), [0, -1])
    assert {client: rows.tolist() for client, rows in shares.items()} == {0: [0]}
    shares = split(images([0, 0, 1]), images([2, 1, 0, 0, 3]), [0, 1, 2])
    assert sorted(torch.cat(list(shares.values())).tolist()) == [1, 2, 3]
    assert split(images([0]), images([0]), [-1]) == {}
    for unlabelled in ((True, False), (False, True)):
        train, test = (
            ImageSet(StoredPixels(torch.zeros(1, 1, 4, 4, dtype=torch.uint8))) if without else images([0])
            for without in unlabelled
        )
        assert split(train, test, [0]) == {}


def test_a_client_without_test_images_is_absent():
    assert split(images([0, 1]), images([1, 1]), [0, 1]).keys() == {1}


def test_the_summary_of_unequal_clients():
    correct = torch.tensor([True, True, True, False, False])
    found = client_accuracies(correct, {3: torch.tensor([0]), 5: torch.tensor([1, 2, 3, 4])})
    assert found == {
        "clients": [3.0, 5.0],
        "accuracies": [1.0, 0.5],
        "images": [1.0, 4.0],
        "accuracy": 0.75,
        "weighted_accuracy": 0.6,  # (1 + 2) of 5 images
        "worst_accuracy": 0.5,
        "accuracy_std": 0.25,
    }


class Confused(nn.Module):
    """Sees one class as another."""

    def __init__(self, seen: int, taken_for: int) -> None:
        super().__init__()
        self.seen, self.taken_for = seen, taken_for

    def forward(self, x):
        pixels = x.flatten(1).clone()
        pixels[:, self.taken_for] += pixels[:, self.seen]
        pixels[:, self.seen] = 0
        return pixels


VIEWS = make_views(ViewOptions(preset="digits", mean=(0.0,), std=(1.0,)), image_size=4, channels=1)
OPTIONS = EvaluationOptions(knn_k=3, probe_epochs=30, probe_lr=0.1)


def measure(encoder, train, test, tests, *protocols, strict=False):
    return evaluate(
        encoder, train, test, VIEWS, OPTIONS, seed=0, protocols=protocols, client_tests=tests, strict=strict
    )


@pytest.mark.parametrize("protocol", ["knn", "probe"])
def test_each_client_is_tested_with_its_model_on_its_classes(protocol):
    """Clients hold classes 0, {1, 2} and 3; one model, of clients 0 and 2, takes 3 for 2, the other 1 for 0."""
    train = images([0] * 9 + [1] * 9 + [2] * 12 + [3] * 9)
    test = images([0, 1, 2, 3] * 10)
    shares = split(train, test, [0] * 9 + [1] * 21 + [2] * 9)
    name = f"clients-{protocol}"
    of_two = measure(Confused(3, 2), train, test, {k: shares[k] for k in (0, 2)}, name)
    of_one = measure(Confused(1, 0), train, test, {1: shares[1]}, name, "knn")
    found = mean_over_clients({"a": of_two, "b": of_one}, {"a": 2, "b": 1})
    assert found[f"{name}/clients"] == [0.0, 1.0, 2.0]
    if (
        protocol == "knn"
    ):  # among the equally near, the first ones vote; a probe prefers the class with more images
        assert found[f"{name}/accuracies"] == [1.0, 0.5, 0.0]
    else:
        assert found[f"{name}/accuracies"][0] == 1.0
        assert found[f"{name}/accuracies"][2] == 0.0
    assert found[f"{name}/images"] == [10.0, 20.0, 10.0]
    accuracies = found[f"{name}/accuracies"]
    assert found[f"{name}/accuracy"] == pytest.approx(sum(accuracies) / 3)
    assert found[f"{name}/weighted_accuracy"] == pytest.approx(
        (accuracies[0] + 2 * accuracies[1] + accuracies[2]) / 4
    )
    assert found[f"{name}/worst_accuracy"] == 0.0
    assert by_client(found)[2.0] == {"images": 10, f"{protocol}/accuracy": 0.0}


def test_a_model_that_nobody_uses_adds_nothing():
    train = images([0, 1] * 5)
    test = images([0, 1] * 3)
    used = measure(nn.Flatten(), train, test, {0: torch.arange(6)}, "clients-knn")
    idle = measure(Confused(1, 0), train, test, {}, "clients-knn")
    found = mean_over_clients({"used": used, "idle": idle}, {"used": 1, "idle": 0})
    assert found["clients-knn/accuracy"] == found["clients-knn/worst_accuracy"] == 1.0


def test_without_clients_the_other_protocols_are_measured_and_a_strict_caller_is_told():
    train, test = images([0, 1] * 5), images([0, 1] * 3)
    found = measure(nn.Flatten(), train, test, None, "knn", "clients-knn")
    assert found["knn/accuracy"] == 1.0
    assert found["note"].startswith("clients-knn: not measured, because these test images are not split")
    assert not any(key.startswith("clients-") for key in found)
    with pytest.raises(UserError, match="clients-knn cannot be measured, because these test images"):
        measure(nn.Flatten(), train, test, None, "clients-knn", strict=True)
