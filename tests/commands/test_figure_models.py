"""Maps and landscapes of kept models against direct readings of the same models."""

import math
import shutil

import pytest
import torch

from atoll.commands.figure_models import _loss, landscape, representation_maps
from atoll.core.kept_models import kept_models
from atoll.core.run_folder import Run
from atoll.core.tree import load
from atoll.engines.federation import Federation
from tests.harness import run_tiny, tiny

SETTINGS = ("method.name=ssd", "train.keep_models_every=1", "train.keep_local_models=[-1]")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return run_tiny(tmp_path_factory.mktemp("kept") / "run", *SETTINGS)


def test_the_loss_at_a_models_place_on_the_plane_is_that_models_loss(run):
    """Three models lie in one plane, so the grid through their places has the losses of the models themselves."""
    found = landscape(run, 3)
    federation = Federation(tiny(*SETTINGS))
    weights = [load(kept_models(run.folder, number)["global"]) for number in range(3)]
    steps = [
        torch.cat([(w[n] - weights[2][n]).flatten() for n in w if n not in federation.setting.buffers])
        for w in weights
    ]
    for step, (x, y) in zip(steps, found["path"], strict=True):
        assert math.hypot(x, y) == pytest.approx(float(step.norm()), rel=1e-4)
    assert found["path"][-1] == [0, 0]
    # The grid is linear in its coordinates: read it at the model of round 1 by a grid that ends there.
    direct = [_loss(federation, w) for w in weights]
    assert len({round(value, 4) for value in direct}) == 3
    low, high = found["xs"][0], found["xs"][-1]
    places = [x for x, _ in found["path"]]
    assert low < min(places)
    assert high > max(places)
    assert found["xs"][1] == pytest.approx((low + high) / 2, abs=1e-5)


def test_the_plane_reaches_the_models(run, monkeypatch):
    import atoll.commands.figure_models as module

    federation = Federation(tiny(*SETTINGS))
    direct = _loss(federation, load(kept_models(run.folder, 1)["global"]))
    at = landscape(run, 2)["path"][1]
    axes = iter([[at[0]], [at[1]]])
    monkeypatch.setattr(module, "_axis", lambda places, resolution: next(axes))
    assert landscape(run, 1)["loss"][0][0] == pytest.approx(direct, rel=1e-4)


def test_a_map_shows_the_models_together_and_says_how_far_their_weights_are(run):
    found = representation_maps(run, ("global", "client-0", "client-2"), "model")
    assert found["names"] == ["global", "client-0", "client-2"]
    counts = [found["groups"].count(k) for k in range(3)]
    assert counts[0] == counts[1] == counts[2] > 0
    assert len(found["points"]) == sum(counts)
    files = kept_models(run.folder, 2)
    a, b = load(files["global"]), load(files["client-2"])
    skipped = Federation(tiny(*SETTINGS)).setting.running_statistics
    distance = sum(
        float((a[n].double() - b[n].double()).norm())
        for n in a
        if n not in skipped and a[n].is_floating_point()
    )
    assert found["remarks"][1] == f"weight distance global – client-2: {distance:.2f}"


def test_classes_without_a_colour_are_others(run):
    found = representation_maps(run, ("client-1",), "class", (3, 8))
    labels = Federation(tiny(*SETTINGS)).splits.test.labels
    assert found["names"] == ["3", "8", "other"]
    assert found["groups"] == [{3: 0, 8: 1}.get(label, 2) for label in labels.tolist()]
    assert found["remarks"] == []


def test_models_that_were_not_kept_are_not_shown(run, tmp_path):
    assert representation_maps(run, ("client-9",), "class") is None
    plain = run_tiny(tmp_path / "plain")
    assert representation_maps(plain, ("global",), "class") is None
    assert landscape(plain, 3) is None


def test_models_have_a_colour_each_without_labels_too(run, tmp_path):
    folder = shutil.copytree(run.folder, tmp_path / "run")
    recipe = folder / "recipe.toml"
    text = recipe.read_text().partition("\n")[2].replace("labels = true", "labels = false")
    assert "labels = false" in text
    recipe.write_text(text)
    found = representation_maps(Run(folder), ("global", "client-0"), "model")
    assert found["groups"].count(0) == found["groups"].count(1) == len(found["points"]) / 2 > 0
