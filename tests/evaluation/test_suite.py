import copy
import json
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from atoll.core.errors import UserError
from atoll.core.rng import stream
from atoll.data.images import ImageSet, StoredPixels
from atoll.data.views.views import ViewOptions, Views, make_views
from atoll.evaluation import (
    EvaluationOptions,
    Results,
    embed,
    evaluate,
    geometry,
    knn_accuracy,
    label_subset,
    linear_probe,
    suite,
)
from atoll.evaluation.finetune import FineTuneResult
from atoll.evaluation.options import PROTOCOLS
from atoll.evaluation.protocols import FINE_TUNES, PROBES
from atoll.evaluation.suite import EVALUATORS
from tests.functional import oracles

Sets = tuple[ImageSet, ImageSet]
OPTIONS = EvaluationOptions(knn_k=20, probe_epochs=100, geometry_samples=150)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 12, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(12)

    def feature_maps(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).relu()

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.adaptive_avg_pool2d(self.feature_maps(x), 2).flatten(1)


@pytest.fixture
def encoder() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Net().train()


@pytest.fixture
def views() -> Views:
    return make_views(ViewOptions(preset="digits", mean=(0.3,), std=(0.4,)), image_size=8, channels=1)


CLIENTS = torch.arange(600) % 7 - 1  # -1: held by nobody


def measure(encoder: nn.Module, digits: Sets, views: Views, *protocols: str, seed: int = 0) -> Results:
    return evaluate(
        encoder, *digits, views, OPTIONS, seed=seed, protocols=protocols or None, client_ids=CLIENTS
    )


def test_numbers_are_those_of_the_parts(encoder: nn.Module, digits: Sets, views: Views) -> None:
    train, test = digits
    found = measure(encoder, digits, views)
    train_h, test_h = (embed(encoder, views.plain, each.images) for each in digits)
    assert train.labels is not None
    assert test.labels is not None
    labelled = (train_h, train.labels, test_h, test.labels)
    assert found["knn/accuracy"] == knn_accuracy(*labelled, k=20)
    assert (found["knn/k"], found["knn/temperature"]) == (20, 0.1)
    protocol = OPTIONS.probe_protocol()
    probe = linear_probe(*labelled, protocol, stream(0, "probe"))
    assert found["probe/accuracy"] == probe.accuracy > 0.5
    assert found["probe/name"] == "ssd, changed: epochs"
    assert (found["probe/lr"], found["probe/epochs"], found["probe/batch_size"]) == (3e-3, 100, 512)


def test_geometry_is_of_a_drawn_part_and_says_so(encoder: nn.Module, digits: Sets, views: Views) -> None:
    found = measure(encoder, digits, views, "geometry")
    assert (found["geometry/images"], found["geometry/of_test_images"]) == (150, 200)
    assert found["geometry/client_images"] == 150
    whole = geometry(embed(encoder, views.plain, digits[1].images))
    assert found["geometry/uniformity"] == pytest.approx(whole["uniformity"], rel=0.05)
    assert found["geometry/uniformity"] != whole["uniformity"]
    assert 0 < found["geometry/alignment"] < 4
    parts = [found[f"geometry/clients_uniformity{part}"] for part in ("", "_intra", "_inter")]
    assert min(parts[1:]) < parts[0] < max(parts[1:])


def test_images_that_no_client_holds_do_not_count(encoder: nn.Module, digits: Sets, views: Views) -> None:
    held = torch.full((600,), -1)
    held[:60] = torch.arange(60) % 3
    found = evaluate(encoder, *digits, views, OPTIONS, seed=0, protocols=["geometry"], client_ids=held)
    expected = geometry(
        embed(encoder, views.plain, digits[0].subset(torch.arange(60)).images),
        clients=(embed(encoder, views.plain, digits[0].subset(torch.arange(60)).images), held[:60]),
    )
    assert found["geometry/client_images"] == 60
    assert found["geometry/clients_uniformity_intra"] == pytest.approx(expected["clients_uniformity_intra"])
    nobody = evaluate(
        encoder, *digits, views, OPTIONS, seed=0, protocols=["geometry"], client_ids=torch.full((600,), -1)
    )
    assert "geometry/clients_uniformity" not in nobody


def test_repeats_exactly_alone_or_among_others(encoder: nn.Module, digits: Sets, views: Views) -> None:
    every = measure(encoder, digits, views)
    assert every == measure(encoder, digits, views)
    for name in ("knn", "probe"):
        alone = measure(encoder, digits, views, name)
        assert alone == {key: value for key, value in every.items() if key.startswith(f"{name}/")}
    alone = measure(encoder, digits, views, "geometry")
    assert alone["geometry/alignment"] == every["geometry/alignment"]
    assert alone["geometry/uniformity"] == pytest.approx(every["geometry/uniformity"], rel=1e-6)
    whole = replace(OPTIONS, geometry_samples=1000)
    seeds = [evaluate(encoder, *digits, views, whole, seed=seed, protocols=["geometry"]) for seed in (0, 1)]
    assert seeds[0]["geometry/alignment"] != seeds[1]["geometry/alignment"]
    assert seeds[0]["geometry/uniformity"] == seeds[1]["geometry/uniformity"]


@pytest.mark.parametrize("count", [50, 100, 500])
def test_a_probe_on_a_number_of_labels_reads_these_alone(digits: Sets, views: Views, count: int) -> None:
    labels = torch.arange(600) % 4
    pixels = torch.zeros(600, 1, 8, 8, dtype=torch.uint8)
    pixels.view(600, 64)[torch.arange(600), labels] = 255  # a pixel for each class
    pure, encoder, name = ImageSet(StoredPixels(pixels), labels), nn.Flatten(), f"probe-ssd-{count}-labels"
    found = measure(encoder, (pure, replace(pure)), views, name)
    assert (found[f"{name}/train_images"], found[f"{name}/accuracy"]) == (count, 1.0)
    train, test = digits
    assert train.labels is not None
    assert test.labels is not None
    rows = label_subset(train.labels, 1.0, stream(0, "probe-labels"), count)
    train_h, test_h = (embed(encoder, views.plain, each.images) for each in digits)
    labelled = (train_h[rows], train.labels[rows], test_h, test.labels)
    expected = linear_probe(*labelled, PROBES["ssd"], stream(0, "probe"))
    assert measure(encoder, digits, views, name)[f"{name}/accuracy"] == expected.accuracy > 0.5


def test_the_encoder_leaves_as_it_came(encoder: nn.Module, digits: Sets, views: Views) -> None:
    before = copy.deepcopy(encoder.state_dict())
    measure(encoder, digits, views)
    assert encoder.training
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())


def test_everything_is_flat_json(encoder: nn.Module, digits: Sets, views: Views) -> None:
    found = measure(encoder, digits, views)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert len(found["geometry/singular_values"]) == 48


@pytest.mark.parametrize(
    ("without", "named"), [((0,), "training"), ((1,), "test"), ((0, 1), "training and test")]
)
def test_without_labels_the_geometry_alone_and_why(
    encoder: nn.Module, digits: Sets, views: Views, without: tuple[int, ...], named: str
) -> None:
    sets = [ImageSet(each.images) if i in without else each for i, each in enumerate(digits)]
    found = evaluate(encoder, *sets, views, OPTIONS, seed=0)
    note = found.pop("note")
    assert isinstance(note, str)
    assert f"knn, probe: not measured, because the {named} images have no labels" in note
    assert found
    assert all(key.startswith("geometry/") for key in found)


def test_without_held_out_images_the_geometry_alone_and_why(
    encoder: nn.Module, digits: Sets, views: Views
) -> None:
    train = digits[0]
    found = evaluate(encoder, train, train, views, OPTIONS, seed=0)
    assert str(found.pop("note")).startswith("knn, probe: not measured, because no images are held out")
    assert found == evaluate(encoder, train, train, views, OPTIONS, seed=0, protocols=["geometry"])


def test_strictly_what_cannot_be_measured_is_refused(encoder: nn.Module, digits: Sets, views: Views) -> None:
    train, test = digits
    for sets, why in (
        ((train, train), "no images are held out"),
        ((train, ImageSet(test.images)), "the test im"),
    ):
        with pytest.raises(
            UserError, match=f"knn, probe cannot be measured, because {why}.*data.test_fraction"
        ):
            evaluate(encoder, *sets, views, OPTIONS, seed=0, strict=True)
        alone = evaluate(encoder, *sets, views, OPTIONS, seed=0, protocols=["geometry"], strict=True)
        assert "geometry/uniformity" in alone


def test_named_protocols_are_the_papers_whatever_the_recipe_changes(
    encoder: nn.Module, digits: Sets, views: Views, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = measure(encoder, digits, views, "probe-orchestra")
    assert found["probe-orchestra/epochs"] == PROBES["orchestra"].epochs
    assert "crops and flips" in str(found["probe-orchestra/differs"])


def test_l_dawas_probe_reads_maps_of_images_that_are_not_normalised(
    encoder: nn.Module, digits: Sets, views: Views
) -> None:
    train, test = digits
    small = (train.subset(torch.arange(200)), test.subset(torch.arange(100)))
    found = evaluate(encoder, *small, views, OPTIONS, seed=0, protocols=["probe-l-dawa"])
    h = [embed(encoder, lambda x: x.float() / 255, each.images, maps=True) for each in small]
    assert small[0].labels is not None
    assert small[1].labels is not None
    protocol = PROBES["l-dawa"]
    expected = linear_probe(h[0], small[0].labels, h[1], small[1].labels, protocol, stream(0, "probe"))
    assert found["probe-l-dawa/accuracy"] == expected.accuracy


def test_a_probe_with_few_labels(encoder: nn.Module, digits: Sets, views: Views) -> None:
    found = measure(encoder, digits, views, "probe-dec-ssl", "probe-dec-ssl-1")
    assert found["probe-dec-ssl/train_images"] == len(digits[0])
    assert found["probe-dec-ssl-1/train_images"] == 10  # one of each digit
    assert found["probe-dec-ssl-1/accuracy"] < found["probe-dec-ssl/accuracy"]


def test_the_recipe_says_which_epoch_of_fine_tuning_counts(
    encoder: nn.Module, digits: Sets, views: Views
) -> None:
    small = (digits[0], digits[1].subset(torch.arange(50)))
    best = replace(OPTIONS, finetune_select="best")
    found = evaluate(encoder, *small, views, best, seed=0, protocols=["finetune-1"])
    assert found["finetune-1/select"] == "best"
    assert found["finetune-1/accuracy"] >= found["finetune-1/last_accuracy"]


def test_fine_tuning_by_name(encoder: nn.Module, digits: Sets, views: Views) -> None:
    train, test = digits
    small = (train, test.subset(torch.arange(100)))
    found = evaluate(encoder, *small, views, OPTIONS, seed=0, protocols=["finetune-1"])
    assert found["finetune-1/labels"] == 10  # one of each digit, of about 60
    assert found["finetune-1/flip"] == 0  # the digits' views have none
    assert found["finetune-1/accuracy"] > 0.3


def test_fine_tuning_reads_the_recipes_views_images_and_stream(
    encoder: nn.Module, digits: Sets, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The protocol's crops, with the mean and deviation of the recipe's views, and flips only if these flip."""
    train, test = digits
    seen: dict[str, object] = {}

    def record(*arguments: object, **named: object) -> FineTuneResult:
        seen.update(named, arguments=arguments)
        return FineTuneResult(accuracy=0.75, last_accuracy=0.5, epoch=3, labels=11, protocol=FINE_TUNES[name])

    monkeypatch.setattr(suite, "finetune", record)
    name = "finetune-10"
    for flip in (0.0, 0.3):
        own = make_views(
            ViewOptions(preset="digits", mean=(0.3,), std=(0.4,), flip=flip), image_size=8, channels=1
        )
        found = evaluate(
            encoder, train, test, own, OPTIONS, seed=5, protocols=[name], client_ids=CLIENTS, device="cpu"
        )
        augment = seen["augment"]
        assert isinstance(augment, Views)
        settings = augment.settings
        assert (settings.flip, settings.mean, settings.std) == (flip, (0.3,), (0.4,))
        assert (settings.crop_scale, settings.crop_ratio) == ((0.64, 1.0), (1.0, 1.0))
        assert (augment.image_size, augment.size, augment.channels) == (8, 8, 1)
        assert seen["pixels_to_float"] == own.plain
        assert seen["client_ids"] is CLIENTS
        *subject, protocol, draws = seen["arguments"]
        assert all(one is other for one, other in zip(subject, (encoder, train, test), strict=True))
        assert protocol == OPTIONS.fine_tuning(FINE_TUNES[name])
        assert torch.equal(torch.rand(3, generator=draws), torch.rand(3, generator=stream(5, "finetune")))
        results = {key.removeprefix(f"{name}/"): value for key, value in found.items()}
        expected = {
            "accuracy": 0.75, "last_accuracy": 0.5, "epoch": 3, "labels": 11, "test_images": 200, "flip": flip,
        }  # fmt: skip
        assert results == {**expected, **protocol.constants()}


@pytest.mark.parametrize("among", [False, True])
def test_geometry_is_that_of_the_named_draws(
    encoder: nn.Module, digits: Sets, views: Views, among: bool
) -> None:
    """Two views of the same drawn test images, and drawn images of clients with their owners."""
    train, test = digits
    names = ("geometry", "knn") if among else ("geometry",)
    found = measure(encoder, digits, views, *names, seed=3)
    encoder.eval()

    def drawn(n: int, purpose: str) -> Tensor:
        return torch.randperm(n, generator=stream(3, "subset", purpose))[:150].sort().values

    rows = drawn(200, "geometry-test")
    draws = stream(3, "geometry-views")
    with torch.no_grad():
        pixels = test.images.gather(rows)
        h = encoder(views.plain(pixels)).double()
        pairs = []
        for _ in range(2):
            parts = pixels.split(OPTIONS.batch_size)
            pairs.append(torch.cat([encoder(views(part, draws)) for part in parts]).double())
        held = torch.tensor([place for place in range(600) if place % 7])
        held = held[drawn(len(held), "geometry-clients")]
        owned = encoder(views.plain(train.images.gather(held))).double()
    assert found["geometry/alignment"] == pytest.approx(oracles.alignment(*pairs), rel=1e-4)
    assert found["geometry/uniformity"] == pytest.approx(oracles.uniformity(h, 2.0), rel=1e-4)
    potentials = oracles.potentials(owned, 2.0)
    owners = [int(place) % 7 for place in held]
    intra = [value for (i, j), value in potentials.items() if owners[i] == owners[j]]
    inter = [value for (i, j), value in potentials.items() if owners[i] != owners[j]]
    for name, values in (("intra", intra), ("inter", inter)):
        expected = math.log(sum(values) / len(values))
        assert found[f"geometry/clients_uniformity_{name}"] == pytest.approx(expected, rel=1e-4)


def test_fewer_training_images_than_neighbours(encoder: nn.Module, digits: Sets, views: Views) -> None:
    train, test = digits
    options = replace(OPTIONS, knn_k=500)
    with pytest.warns(UserWarning, match="500 neighbours"):
        found = evaluate(
            encoder, train.subset(torch.arange(30)), test, views, options, seed=0, protocols=["knn"]
        )
    assert found["knn/k"] == 30


def test_mistakes_get_a_sentence(encoder: nn.Module, digits: Sets, views: Views) -> None:
    with pytest.raises(UserError, match="did you mean 'knn'"):
        measure(encoder, digits, views, "kn")
    with pytest.raises(UserError, match="at least 2 test images"):
        evaluate(encoder, digits[0], digits[1].subset(torch.arange(1)), views, OPTIONS, seed=0)
    with torch.no_grad():
        encoder.conv.weight[0, 0, 0, 0] = torch.nan
    with pytest.raises(UserError, match="not finite"):
        measure(encoder, digits, views)


def test_every_protocol_has_an_evaluator_and_the_other_way_round():
    assert set(EVALUATORS) == set(PROTOCOLS)
