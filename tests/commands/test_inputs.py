"""What a run reads may not change between its start and its resumption."""

import json

import numpy as np
import pytest
from PIL import Image

from atoll.commands.evaluate import measure_run
from atoll.commands.handle import Run as RunHandle
from atoll.commands.run_files import partition_of
from atoll.core.errors import UserError
from atoll.core.run_folder import Run
from tests.harness import run_tiny

SMALL = ("data.limit=40", "partition.clients=2", "train.rounds=1", "method.name=fed_simclr")


@pytest.mark.parametrize("frozen", [True, False])
def test_weights_of_a_warm_start_that_do_not_train_must_be_those_of_the_start(tmp_path, frozen):
    base = run_tiny(tmp_path / "base", *SMALL)
    settings = (
        *SMALL,
        f"train.start={base.folder}",
        *(("model.freeze=['encoder.conv1*']",) if frozen else ()),
    )
    run_tiny(tmp_path / "run", *settings)
    run_tiny(base.folder, *SMALL, "train.rounds=2", resume=True)
    if frozen:
        with pytest.raises(
            UserError, match=r"was started from other weights than .*\(train\.start\); restore"
        ):
            run_tiny(tmp_path / "run", *settings, "train.rounds=2", resume=True)
    else:  # nothing of them is read again
        run_tiny(tmp_path / "run", *settings, "train.rounds=2", resume=True)
        with pytest.warns(UserWarning, match="had finished, from the weights that .* it holds others now"):
            run_tiny(tmp_path / "run", *settings, "train.rounds=2", resume=True)


def noise(folder, seed):
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(seed)
    for number in range(24):
        Image.fromarray(rng.integers(0, 255, (8, 8), dtype=np.uint8)).save(folder / f"{number:02}.png")


@pytest.fixture
def fedca(tmp_path):
    """Settings of FedCA, with public images that can change."""
    noise(tmp_path / "public", 0)
    return (
        *SMALL[:3],
        *("method.name=fedca", "options.fedca_alignment.train_epochs=1", "options.fedca_dictionary.size=16"),
        *(
            "options.fedca_alignment.data.source=images",
            f"options.fedca_alignment.data.path={tmp_path / 'public'}",
        ),
    )


def test_public_images_must_be_those_of_the_alignment_model(tmp_path, fedca):
    run_tiny(tmp_path / "run", *fedca)
    noise(tmp_path / "public", 1)
    sentence = r"needs the run in .*alignment first: .* was started with other training images"
    with pytest.raises(UserError, match=sentence):
        run_tiny(tmp_path / "run", *fedca, "train.rounds=2", resume=True)
    noise(tmp_path / "public", 0)
    run_tiny(tmp_path / "run", *fedca, "train.rounds=2", resume=True)


def test_a_run_that_has_not_begun_trains_its_alignment_model_again_on_other_images(tmp_path, fedca):
    run_tiny(tmp_path / "run", *fedca)
    inner = Run(tmp_path / "run" / "prerequisites" / "alignment")
    before = partition_of(inner).fingerprint
    for path in (tmp_path / "run").glob("*.*"):  # as if it had not begun
        if path.name != "recipe.toml":
            path.unlink()
    for path in (tmp_path / "run" / "checkpoints").glob("round-*"):
        path.unlink()
    noise(tmp_path / "public", 1)
    run_tiny(tmp_path / "run", *fedca, resume=True)
    assert partition_of(inner).fingerprint != before


def test_the_record_of_a_warm_start_names_the_file(tmp_path):
    base = run_tiny(tmp_path / "base", *SMALL)
    run = run_tiny(tmp_path / "run", *SMALL, f"train.start={base.folder}", "model.freeze=['encoder.conv1*']")
    record = json.loads(run.read("start.json"))
    assert record["file"] == str(base.encoder_path)


def test_a_finished_run_does_not_pass_for_one_on_other_images(tmp_path):
    for number, name in enumerate("ab"):
        noise(tmp_path / name, number)
    settings = ("data.source=images", "data.test_fraction=0.5", "evaluation.at_end=['geometry']", *SMALL)
    run_tiny(tmp_path / "run", *settings, f"data.path={tmp_path / 'a'}")
    with pytest.raises(UserError, match="was started with other training images"):
        run_tiny(tmp_path / "run", *settings, f"data.path={tmp_path / 'b'}", resume=True)
    with pytest.raises(UserError, match="no file or folder"):
        run_tiny(tmp_path / "run", *settings, f"data.path={tmp_path / 'c'}", resume=True)
    (tmp_path / "a").rename(tmp_path / "c")
    run_tiny(tmp_path / "run", *settings, f"data.path={tmp_path / 'c'}", resume=True)


@pytest.mark.parametrize("option", ["train.start", "model.weights"])
def test_a_run_goes_on_where_the_weights_of_its_start_lie_elsewhere_now(tmp_path, option):
    base = run_tiny(tmp_path / "base", *SMALL)
    places = [str(base.folder if option == "train.start" else base.encoder_path)]
    run_tiny(tmp_path / "run", *SMALL, f"{option}={places[0]}")
    base.folder.rename(tmp_path / "moved")
    moved = places[0].replace(str(base.folder), str(tmp_path / "moved"))
    run = run_tiny(tmp_path / "run", *SMALL, f"{option}={moved}", "train.rounds=2", resume=True)
    assert run.results["round"] == 2


def test_a_finished_run_needs_no_file_of_weights(tmp_path):
    base = run_tiny(tmp_path / "base", *SMALL)
    run = run_tiny(tmp_path / "run", *SMALL, f"model.weights={base.encoder_path}")
    before = measure_run(run, ["knn"])
    base.encoder_path.unlink()
    assert measure_run(run, ["knn"]) == before
    assert "finished" in repr(RunHandle(run.folder))
