"""Whole runs on images that Python code gives or a recipe names, against the same images read from a file."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import ImageFolder

import atoll
from atoll.cli.main import main
from atoll.core.errors import UserError
from atoll.data.options import DataOptions
from atoll.data.sources import load_data
from atoll.recipe.recipe import make_recipe
from tests.data.given import LABELS, Pairs, clients, pixels, small
from tests.harness import final_models
from tests.kills import ends_alike_after_kills
from tests.trees import same


def test_a_folder_as_a_dataset_trains_the_same_weights_as_the_folder(tmp_path: Path) -> None:
    for row, image in enumerate(pixels()):
        folder = tmp_path / "images" / "abc"[LABELS[row]]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{row:02}.png")
    folder = {"image_size": 8, "source": "folder", "path": str(tmp_path / "images")}
    named = atoll.simulate(small(data=folder), tmp_path / "named")
    given = atoll.simulate(small(), tmp_path / "given", data=ImageFolder(str(tmp_path / "images")))
    assert given.encoder_path.read_bytes() == named.encoder_path.read_bytes()


def test_a_dict_is_a_client_for_each_name(tmp_path: Path) -> None:
    run = atoll.simulate(small(), tmp_path / "run", data=clients(pixels()))
    found = run.read_json("partition.json")["clients"]
    assert [client["name"] for client in found] == ["north", "south"]
    assert sum(len(client["indices"]) for client in found) == 48  # a fifth is held out
    assert {run.neighbours(pixels()[0], k=1).clients[0]} <= {"north", "south"}


def test_the_recipe_holds_the_name_and_a_resumed_run_compares_it(tmp_path: Path) -> None:
    run = atoll.simulate(small(), tmp_path / "run", data=Pairs(pixels(), LABELS))
    path = atoll.load_recipe(run.recipe_path).data.path
    assert path.startswith("object:Pairs#")
    longer = small(train={"rounds": 4, "epochs": 1, "batch_size": 16, "lr": 0.01})
    atoll.simulate(longer, run.folder, resume=True, data=Pairs(pixels(), LABELS))
    with pytest.raises(
        UserError, match=r"started with data.path = 'object:Pairs#\w+', and the recipe now says"
    ):
        atoll.simulate(longer, run.folder, resume=True, data=Pairs(pixels()[::-1], LABELS))
    with pytest.raises(
        UserError, match=r"data.* = 'object', .*: give the same data=… again, choose another --out"
    ):
        atoll.simulate(longer, run.folder, resume=True)
    with pytest.raises(
        UserError,
        match=r"given to their run as an object.*pass them again as data=.*simulate with resume=True",
    ):
        atoll.simulate(run.recipe_path, tmp_path / "other")


def bands(count: int = 60, channels: int = 6) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (count, 8, 8, channels), dtype=np.uint8)


def test_arrays_of_any_number_of_channels_train(tmp_path: Path) -> None:
    """As arrays, as tensors and as files: the same weights, of a network for six channels."""
    data = {"image_size": 8, "channels": 6}
    evaluation = {"at_end": [], "every": 0, "map_points": 8}
    run = atoll.simulate(small(data=data, evaluation=evaluation), tmp_path / "run", data=(bands(), LABELS))
    assert run.report().is_file()  # its pictures show three of the channels
    assert run.encoder()(torch.zeros(1, 6, 8, 8)).shape[0] == 1
    assert run.neighbours(bands()[0], k=1).names == ["#0"]
    again = torch.from_numpy(bands()).permute(0, 3, 1, 2)
    other = atoll.simulate(small(data=data), tmp_path / "tensor", data=(again, torch.tensor(LABELS)))
    assert other.encoder_path.read_bytes() == run.encoder_path.read_bytes()
    for row, image in enumerate(bands()):
        folder = tmp_path / "files" / "abc"[LABELS[row]]
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / f"{row:02}.npy", image.transpose(2, 0, 1) if row % 2 else image)
    files = {**data, "source": "folder", "path": str(tmp_path / "files")}
    in_order = np.argsort(LABELS, kind="stable")
    by_file = atoll.simulate(small(data=files), tmp_path / "named")
    given = atoll.simulate(small(data=data), tmp_path / "given", data=(bands()[in_order], np.sort(LABELS)))
    assert same(final_models(by_file), final_models(given))


def test_another_number_of_channels_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"image 0 of the given tuple \(it has 6 channels, and the encoder reads data.channels = 4\)",
    ):
        atoll.simulate(small(data={"image_size": 8, "channels": 4}), tmp_path / "run", data=(bands(), LABELS))


KILLED = """
import sys; sys.path.insert(0, {root!r})
from collections.abc import Iterator
from pathlib import Path
import atoll
from tests.data import given as ours
from tests.kills import Killed

class Cell(ours.Pairs):  # of __main__, as a notebook's classes are
    pass

if __name__ == "__main__":
    workers, kill = int(sys.argv[2]), sys.argv[3] == "kill"
    data = {{name: Cell(part.images, part.labels) for name, part in ours.clients(ours.pixels()).items()}}
    recipe = ours.small(engine={{"workers": workers}})
    atoll.simulate(recipe, sys.argv[1], Path(sys.argv[1]).exists(), data=data, callbacks=[Killed()] if kill else [])
"""


@pytest.mark.slow
def test_two_workers_and_a_kill_end_with_the_same_bytes(tmp_path: Path) -> None:
    ends_alike_after_kills(KILLED, tmp_path)


CODE = """
from tests.data.given import LABELS, Pairs, clients, pixels

DATA = Pairs(pixels(), LABELS)
ARRAYS = (pixels(), LABELS)
CLIENTS = clients(pixels())
SPLITS = {"train": CLIENTS, "held": Pairs(255 - pixels(20), LABELS[:20])}
FOUR = 4


def make():
    return DATA


def broken():
    raise ValueError("no disk")


class Own(Pairs):
    def __init__(self):
        super().__init__(pixels(), LABELS)
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Writes the user's module anew."""
    file = tmp_path / "own_images.py"
    monkeypatch.chdir(tmp_path)

    def write(code: str) -> Path:
        file.write_text(code)
        sys.modules.pop("own_images", None)
        importlib.invalidate_caches()
        return file

    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "path", list(sys.path))
    write(CODE)
    yield write
    sys.modules.pop("own_images", None)


@pytest.mark.parametrize("attribute", ["DATA", "ARRAYS", "make", "Own"])
def test_each_form_trains_the_weights_of_given_images(mine: object, tmp_path: Path, attribute: str) -> None:
    data = {"image_size": 8, "source": f"own_images:{attribute}"}
    one = {"rounds": 1, "epochs": 1, "batch_size": 16, "lr": 0.01}
    named = atoll.simulate(small(data=data, train=one, engine={"workers": 2}), tmp_path / "named")
    given = atoll.simulate(small(train=one), tmp_path / "given", data=Pairs(pixels(), LABELS))
    assert given.encoder_path.read_bytes() == named.encoder_path.read_bytes()


def test_a_dict_has_the_clients_of_a_natural_partition(mine: object, tmp_path: Path) -> None:
    data = {"image_size": 8, "source": "own_images:CLIENTS"}
    run = atoll.simulate(small(data=data, partition={"kind": "natural"}), tmp_path / "run")
    given = atoll.simulate(small(), tmp_path / "given", data=clients(pixels()))
    assert [one["name"] for one in run.read_json("partition.json")["clients"]] == ["north", "south"]
    assert given.encoder_path.read_bytes() == run.encoder_path.read_bytes()


def test_a_dict_of_splits_trains_and_measures_as_given_test_images(mine: object, tmp_path: Path) -> None:
    recipe = small(partition={"kind": "natural"}, evaluation={"at_end": ["knn", "probe"], "every": 0})
    data = {"image_size": 8, "source": "own_images:SPLITS", "test_split": "held"}
    named = atoll.simulate({**recipe, "data": data}, tmp_path / "named")
    held = Pairs(255 - pixels(20), LABELS[:20])
    given = atoll.simulate(recipe, tmp_path / "given", data=clients(pixels()), test_data=held)
    assert named.encoder_path.read_bytes() == given.encoder_path.read_bytes()
    assert named.results["knn/accuracy"] == given.results["knn/accuracy"]
    assert named.results["probe/accuracy"] == given.results["probe/accuracy"]
    assert sum(len(one["indices"]) for one in named.read_json("partition.json")["clients"]) == 60


def test_one_split_names_the_classes_of_both(mine: Callable[[str], Path]) -> None:
    code = "DATA = Pairs(pixels(), LABELS)\nDATA.classes = ['x', 'y', 'z']\n"
    mine(CODE + code + "SPLITS = {'train': (pixels(), LABELS), 'test': DATA}\n")
    splits = load_data(DataOptions(source="own_images:SPLITS", test_split="test", image_size=8), seed=0)
    assert splits.test is not None
    assert splits.train.classes == splits.test.classes == ["x", "y", "z"]
    np.testing.assert_array_equal(splits.train.labels, LABELS)


@pytest.mark.parametrize(
    ("attribute", "split", "missing"),
    [("make", "held", "train"), ("SPLITS", "test", "test"), ("CLIENTS", "held", "train")],
)
def test_a_missing_split_is_named(mine: object, attribute: str, split: str, missing: str) -> None:
    sentence = (
        f"data.source = 'own_images:{attribute}' has no split '{missing}'; with data.test_split, give a dict "
        f"with the keys 'train' and '{split}', or leave data.test_split out"
    )
    with pytest.raises(UserError, match=f"^{re.escape(sentence)}$"):
        load_data(DataOptions(source=f"own_images:{attribute}", test_split=split), seed=0)


def test_a_resumed_run_compares_the_code(mine: Callable[[str], Path], tmp_path: Path) -> None:
    data = {"image_size": 8, "source": "own_images:make"}
    atoll.simulate(small(data=data), tmp_path / "run")
    longer = small(data=data, train={"rounds": 4, "epochs": 1, "batch_size": 16, "lr": 0.01})
    mine(CODE.replace("return DATA", "return DATA, 3"))
    with pytest.raises(UserError, match="computed with another version of own_images:make"):
        atoll.simulate(longer, tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    ("attribute", "sentence"),
    [
        ("FOUR", r"data.source = 'own_images:FOUR' is an int; give a dataset with a length"),
        (
            "broken",
            r"'own_images:broken' is called without arguments and fails: ValueError: no disk \(.*py, line",
        ),
        ("LABELS", r"data.source = 'own_images:LABELS'\[0\]: "),
        ("NONE", r"data.source 'own_images:NONE': module 'own_images' has no 'NONE'"),
    ],
)
def test_what_is_no_data_is_refused_with_the_name(mine: object, attribute: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        load_data(DataOptions(source=f"own_images:{attribute}"), seed=0)


def test_a_path_beside_own_data_is_warned_of(mine: object) -> None:
    with pytest.warns(UserWarning, match="data.path = 'cifar10' is not read, because data.source is 'own_"):
        splits = load_data(DataOptions(source="own_images:make", path="cifar10", image_size=8), seed=0)
    assert len(splits.train) == 48
    assert splits.test is not None
    np.testing.assert_array_equal(np.bincount(splits.train.labels), [16, 16, 16])


def test_commands_import_the_code_only_when_told(
    mine: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["--set", "data.source=own_images:make", "partition.kind=iid", "partition.clients=2"]
    command = ["data", "digits", *settings, "-o", str(tmp_path / "clients.svg")]
    assert main(command) == 2
    assert "own_images:make" in capsys.readouterr().err
    assert "own_images" not in sys.modules
    assert main([*command, "--run-code"]) == 0
    assert "own_images" in sys.modules
    assert (tmp_path / "clients.svg").is_file()


def test_a_recipe_that_names_data_names_code() -> None:
    recipe = make_recipe({"data": {"source": "mine:DATA"}})
    assert recipe.own_code == ("mine:DATA",)
    assert recipe.trains_with_own_code
    assert replace(recipe, data=DataOptions()).own_code == ()
