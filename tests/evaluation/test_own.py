"""Protocols of the user's code."""

import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans
from sklearn.metrics import normalized_mutual_info_score
from torch import nn

from atoll.core.errors import UserError
from atoll.core.rng import stream
from atoll.data.images import ImageSet
from atoll.data.views.views import ViewOptions, Views, make_views
from atoll.evaluation import EvaluationOptions, Representations, Results, embed, evaluate, linear_probe

Sets = tuple[ImageSet, ImageSet]
OPTIONS = EvaluationOptions(knn_k=20, probe_epochs=20)
VIEWS: Views = make_views(ViewOptions(preset="digits", mean=(0.3,), std=(0.4,)), image_size=8, channels=1)


@pytest.fixture
def encoder() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Dropout(0.5)).train()


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> Callable[[object], str]:
    """Put an object into a module, and return its name."""

    def name(value: object) -> str:
        module = types.ModuleType("mine")
        module.measure = value  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "mine", module)
        return "mine:measure"

    return name


def measured(encoder: nn.Module, digits: Sets, *protocols: str, seed: int = 0) -> Results:
    return evaluate(encoder, *digits, VIEWS, OPTIONS, seed=seed, protocols=protocols)


def test_a_function_measures_what_its_library_measures(
    encoder: nn.Module, digits: Sets, named: Callable[[object], str]
) -> None:
    def clusters(found: Representations) -> dict[str, Any]:
        k = len(found.test.classes)
        labels = KMeans(k, n_init=1, random_state=0).fit_predict(found.test_h)
        return {"nmi": normalized_mutual_info_score(found.test_labels, labels), "k": k}

    found = measured(encoder, digits, named(clusters))
    labels = KMeans(10, n_init=1, random_state=0).fit_predict(embed(encoder, VIEWS.plain, digits[1].images))
    expected = normalized_mutual_info_score(digits[1].labels, labels)
    assert found == {"mine:measure/nmi": expected, "mine:measure/k": 10}
    assert 0.1 < expected < 1


def test_a_function_leaves_pytorchs_settings_as_they_were(
    encoder: nn.Module, digits: Sets, named: Callable[[object], str]
) -> None:
    """It is called before the training, too, whose weights depend on them."""

    def settings() -> tuple[object, ...]:
        return torch.get_num_threads(), torch.get_default_dtype(), torch.backends.mkldnn.enabled

    def meddles(found: Representations) -> dict[str, float]:
        torch.set_num_threads(torch.get_num_threads() + 1)
        torch.set_default_dtype(torch.float64)
        torch.backends.mkldnn.enabled = False
        return {"a": 1.0}

    before = settings()
    assert measured(encoder, digits, named(meddles)) == {"mine:measure/a": 1.0}
    assert settings() == before


def test_a_function_gets_what_atolls_own_probe_reads(
    encoder: nn.Module, digits: Sets, named: Callable[[object], str]
) -> None:
    def probe(found: Representations) -> dict[str, float]:
        labelled = (found.train_h, found.train_labels, found.test_h, found.test_labels)
        return {"accuracy": linear_probe(*labelled, OPTIONS.probe_protocol(), stream(0, "probe")).accuracy}

    found = measured(encoder, digits, "probe", named(probe))
    assert found["mine:measure/accuracy"] == found["probe/accuracy"]


def test_the_encoder_takes_inputs_and_is_in_evaluation_mode(
    encoder: nn.Module, digits: Sets, named: Callable[[object], str]
) -> None:
    def distance(found: Representations) -> dict[str, torch.Tensor]:
        pixels = found.test.images.gather(torch.arange(len(found.test)))
        h = found.encoder(found.to_input(pixels))
        return {"distance": (h - found.test_h).abs().max()}

    assert measured(encoder, digits, named(distance)) == {"mine:measure/distance": 0.0}
    assert encoder.training


def test_a_frozen_encoder_can_be_trained(
    encoder: nn.Module, digits: Sets, named: Callable[[object], str]
) -> None:
    def trainable(found: Representations) -> dict[str, int]:
        return {"weights": sum(weights.requires_grad for weights in found.encoder.parameters())}

    encoder.requires_grad_(False)
    assert measured(encoder, digits, named(trainable)) == {"mine:measure/weights": 2}
    assert not any(weights.requires_grad for weights in encoder.parameters())


def test_what_a_function_changes_or_draws_has_no_effect_on_others(
    encoder: nn.Module, digits: Sets, named: Callable[[object], str]
) -> None:
    def rude(found: Representations) -> dict[str, float]:
        for values in (found.train_h, found.train_labels, found.test_h, found.test_labels):
            values.zero_()
        for images in (found.train, found.test):
            images.images.gather(torch.arange(len(images))).zero_()
            images.labels.zero_()
            images.classes.clear()
            images.columns.clear()
        loss = found.encoder(torch.ones(1, 1, 8, 8)).sum()
        loss.backward()
        for weights in found.encoder.parameters():
            nn.init.zeros_(weights)
        return {"torch": float(torch.rand(())), "numpy": np.random.rand()}

    torch.manual_seed(1)
    before = torch.get_rng_state()
    alone = measured(encoder, digits, "knn", "probe", "geometry")
    together = measured(encoder, digits, named(rude), "knn", "probe", "geometry")
    drawn = {key: together.pop(key) for key in ("mine:measure/torch", "mine:measure/numpy")}
    assert together == alone
    assert torch.equal(torch.get_rng_state(), before)
    assert drawn == measured(encoder, digits, named(rude))
    assert drawn != measured(encoder, digits, named(rude), seed=1)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (3, "is an int, not a function"),
        (lambda found: found.nothing, "fails: AttributeError.*nothing"),
        (lambda found: 0.5, "returns 0.5; it must return a dict"),
        (lambda found: {}, "returns {}; it must return a dict"),
        (lambda found: {"a b": 0.5}, "names a result 'a b'"),
        (lambda found: {3: 0.5}, "names a result 3"),
        (lambda found: {"x": torch.zeros(3)}, "returns a list as x"),
        (lambda found: {"x": None}, "returns None as x"),
        (lambda found: {"x": float("nan")}, "returns nan as x"),
        (lambda found: {"accuracy": 93.5}, r"93.5 as accuracy; an accuracy is a number in \[0, 1\]"),
        (lambda found: {"accuracy": 1.01}, "1.01 as accuracy"),
        (lambda found: {"worst_accuracy": -0.01}, "-0.01 as worst_accuracy"),
        (lambda found: {"accuracy": "high"}, "'high' as accuracy"),
        (lambda found: {"accuracy": True}, "True as accuracy"),
    ],
)
def test_a_mistake_in_a_function(
    value: object, sentence: str, encoder: nn.Module, digits: Sets, named: Callable[[object], str]
) -> None:
    with pytest.raises(UserError, match=f"protocol 'mine:measure' .*{sentence}"):
        measured(encoder, digits, named(value))


@pytest.mark.parametrize("accuracy", [0, 1, 0.0, 1.0])
def test_no_image_or_all_may_be_right(
    accuracy: float, encoder: nn.Module, digits: Sets, named: Callable[[object], str]
) -> None:
    found = measured(encoder, digits, named(lambda found: {"accuracy": accuracy}))
    assert found == {"mine:measure/accuracy": accuracy}


def test_a_text_is_one_line_without_control_characters(
    encoder: nn.Module, digits: Sets, named: Callable[[object], str]
) -> None:
    found = measured(encoder, digits, named(lambda found: {"kind": "full\n\x1b[2J rank"}))
    assert found == {"mine:measure/kind": "full �[2J rank"}


def test_without_labels_it_is_left_out_as_all_classifiers_are(
    encoder: nn.Module, digits: Sets, named: Callable[[object], str]
) -> None:
    bare = tuple(ImageSet(images.images) for images in digits)
    found = measured(encoder, (bare[0], bare[1]), named(lambda found: {"x": 1.0}), "geometry")
    assert "mine:measure/x" not in found
    assert str(found["note"]).startswith("mine:measure: not measured")
