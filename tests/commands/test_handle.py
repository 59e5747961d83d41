"""A run in Python's hands: tables, report, encoder, neighbours, and how it shows itself."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from torch import nn

import atoll
from atoll.commands.embed import embed_images
from atoll.commands.neighbours import find_neighbours
from atoll.core.errors import UserError
from atoll.data.sources import DataOptions, load_data
from tests.harness import run_tiny, tiny
from tests.trees import same


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> atoll.Run:
    folder = tmp_path_factory.mktemp("handle") / "run"
    return atoll.Run(run_tiny(folder, "method.name=ssd", "evaluation.every=1").folder)


def lines(run: atoll.Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]


def test_a_finished_run_without_labels_says_why_it_has_no_accuracy(tmp_path: Path) -> None:
    results = atoll.Run(run_tiny(tmp_path / "run", "data.labels=false").folder).results
    with pytest.raises(
        KeyError, match=r"the accuracies are: none; knn: not measured, because .* have no labels"
    ):
        results["knn/accuracy"]


def test_results_and_metrics_are_what_the_files_hold(run: atoll.Run, tmp_path: Path) -> None:
    saved = json.loads((run.folder / "evaluation.json").read_text())
    assert run.results["knn/accuracy"] == saved["knn/accuracy"]
    assert [line["losses"] for line in run.metrics[1:]] == [line["losses"] for line in lines(run)[1:]]
    nothing = atoll.Run(tmp_path / "none")
    assert (nothing.results, nothing.metrics) == ({}, [])


def test_a_run_that_was_extended_since_shows_its_rounds(tmp_path: Path) -> None:
    run = atoll.simulate(tiny("train.rounds=1"), tmp_path / "run")
    assert repr(run).endswith("finished, 1 of 1 rounds")
    atoll.simulate(tiny("train.rounds=2"), tmp_path / "run", resume=True)
    assert repr(run).endswith("finished, 2 of 2 rounds")


def test_a_list_of_protocols_gets_a_sentence(run: atoll.Run) -> None:
    with pytest.raises(UserError, match=r"the name of one protocol, such as 'knn', and not \['knn'\]"):
        run.evaluate(["knn"])  # type: ignore[arg-type]


@contextmanager
def floats_of_64_bits() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


CALLERS = {
    "floats of 64 bits": floats_of_64_bits,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "another default device": lambda: torch.device("meta"),  # in the place of "cuda"
}


@pytest.mark.parametrize("caller", CALLERS)
def test_what_the_caller_has_set_changes_no_weight_and_no_number(caller: str, tmp_path: Path) -> None:
    image = tmp_path / "images" / "one.png"
    image.parent.mkdir()
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(image)

    def found(folder: Path) -> list[Any]:
        run = atoll.simulate(tiny("method.name=ssd"), folder)
        neighbours = run.neighbours(image)
        exported = run.export("safetensors", folder / "export.safetensors")
        numbers = [run.evaluate(protocol) for protocol in ("probe", "geometry")]
        return [run.encoder_path.read_bytes(), exported.read_bytes(), *numbers, neighbours.similarity]

    expected = found(tmp_path / "plain")
    encoder = atoll.Run(tmp_path / "plain").encoder()
    h = embed_images(encoder, image.parent)[1]
    with CALLERS[caller]():
        assert found(tmp_path / "other") == expected
        assert torch.equal(embed_images(encoder, image.parent)[1], h)


@pytest.mark.parametrize("format", ["pt2", "onnx"])
def test_a_program_reads_float32_whatever_its_caller_computes_in(
    format: str, run: atoll.Run, tmp_path: Path
) -> None:
    pytest.importorskip("onnxscript") if format == "onnx" else None
    encoder, images = run.encoder(), torch.rand(3, 1, 8, 8)
    with floats_of_64_bits():
        program = atoll.load_encoder(run.export(format, tmp_path / f"program.{format}"))
        assert next(run.encoder().parameters()).dtype == torch.float32
    torch.testing.assert_close(program(images), encoder(images))


def test_code_that_calls_them_still_works_with_a_warning(run: atoll.Run) -> None:
    with pytest.warns(DeprecationWarning, match=r"write run\.results"):
        assert run.results() == run.results
    with pytest.warns(DeprecationWarning, match=r"write run\.metrics"):
        assert run.metrics() == run.metrics


def test_a_table_has_a_row_for_each_round(run: atoll.Run) -> None:
    pytest.importorskip("pandas")
    frame = run.to_pandas()
    assert list(frame.index) == [0, 1, 2]
    assert list(frame["losses/dsr"][1:]) == [line["losses"]["dsr"] for line in lines(run)[1:]]
    assert list(frame["evaluation/knn/accuracy"]) == [
        line["evaluation"]["knn/accuracy"] for line in lines(run)
    ]


def test_without_pandas_it_says_what_to_install(run: atoll.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match=r"pip install '\.\[pandas\]'"):
        run.to_pandas()


def test_the_report_and_the_encoder(run: atoll.Run, tmp_path: Path) -> None:
    assert run.report() == run.folder / "report.html"
    assert "SSD" in run.report(tmp_path / "page.html").read_text()
    images = torch.rand(2, 1, 8, 8)
    assert torch.equal(run.encoder()(images), atoll.load_encoder(run.encoder_path)(images))


def test_the_nearest_image_of_a_training_image_is_itself(run: atoll.Run, tmp_path: Path) -> None:
    pixels = load_data(run.recipe.data, 0).train.images.gather(torch.tensor([7]))[0, 0].numpy()
    file = tmp_path / "seven.png"
    Image.fromarray(pixels).save(file)
    partition = json.loads(run.partition_path.read_text())
    owner = next(client["name"] for client in partition["clients"] if 7 in client["indices"])
    for image in (pixels, Image.fromarray(pixels), file, str(file)):
        found = run.neighbours(image, k=3)
        assert (found.names[0], found.clients[0]) == ("#7", owner)
        assert found.similarity[0] == pytest.approx(1)
        assert len(found.names) == 3
    assert f"#7 (client {owner}): 1.000" in repr(found)
    assert "<img" in found._repr_html_()
    assert not (run.folder / "neighbours.safetensors").exists()
    assert find_neighbours(run, file, k=3)["names"] == [found.names]


def test_it_shows_itself_in_a_line_in_a_terminal_and_in_a_notebook(run: atoll.Run, tmp_path: Path) -> None:
    assert repr(run).endswith("SSD, finished, 2 of 2 rounds")
    accuracy = f"{100 * run.results['knn/accuracy']:.2f}"
    console = Console(width=120, record=True, file=(tmp_path / "out").open("w"))
    console.print(run)
    assert accuracy in console.export_text()
    assert accuracy in run._repr_html_()
    empty = atoll.Run(tmp_path / "none")
    assert "no run in this folder" in repr(empty)
    assert "no run in this folder" in empty._repr_html_()


def test_a_run_that_was_given_an_object_has_it(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 5))
    table = {
        "data": {"limit": 60, "image_size": 8, "channels": 1},
        "partition": {"kind": "iid", "clients": 2},
        "views": {"mean": [0.5], "std": [0.5]},
        "train": {"rounds": 0},
        "evaluation": {"at_end": ["knn"], "map_points": 0},
    }
    run = atoll.simulate(table, tmp_path / "run", encoder=net)
    assert run.encoder()(torch.rand(3, 1, 8, 8)).shape == (3, 5)
    assert len(run.neighbours(np.zeros((8, 8), np.uint8), k=2).names) == 2
    with pytest.raises(UserError, match="given to its run as an object"):
        atoll.Run(run.folder).encoder()


def test_a_run_is_evaluated_with_the_objects_that_it_was_given(tmp_path: Path) -> None:
    """As the run was at its end, and as the same images in files are; from its folder, it needs them again."""
    digits = load_data(DataOptions(source="digits", image_size=8, channels=1), seed=0)
    images = [one.images.gather(torch.arange(len(one))).numpy()[:, 0] for one in (digits.train, digits.test)]
    train, test = (
        (pixels, one.labels) for pixels, one in zip(images, (digits.train, digits.test), strict=True)
    )
    table = {
        "base": "digits",
        "partition": {"kind": "iid", "clients": 2},
        "train": {"rounds": 1, "epochs": 1},
        "evaluation": {"at_end": ["knn"], "map_points": 0},
        "engine": {"workers": 1},
    }
    run = atoll.simulate(table, tmp_path / "run", data=train, test_data=test)
    assert run.evaluate("knn")["knn/accuracy"] == run.results["knn/accuracy"]
    named = atoll.simulate(table, tmp_path / "named")
    assert run.evaluate("probe")["probe/accuracy"] == named.evaluate("probe")["probe/accuracy"]
    assert named.evaluate("knn", train, test)["knn/accuracy"] == named.results["knn/accuracy"]
    assert len(list(named.folder.glob("evaluation-knn-on-tuple#*"))) == 1
    again = atoll.Run(run.folder)
    with pytest.raises(UserError, match="pass them again as data="):
        again.evaluate("knn")
    assert again.evaluate("knn", train, test)["knn/accuracy"] == run.results["knn/accuracy"]
    assert not list(run.folder.glob("evaluation-*-on-*"))
    with pytest.raises(UserError, match="test_data is given without data"):
        run.evaluate("knn", test_data=test)


def test_it_stays_the_same_run_when_the_process_moves_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = atoll.simulate(tiny(), "runs/one")
    before = run.results
    assert repr(run).startswith("Run('runs/one'): ")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert run.results == before != {}
    assert run.encoder().dim == atoll.load_encoder(tmp_path / "runs/one/encoder.safetensors").dim
    assert run.report() == tmp_path / "runs/one/report.html"
    assert repr(run).startswith(f"Run({str(tmp_path / 'runs/one')!r}): ")


def test_images_are_embedded_as_the_encoder_computes_them(run: atoll.Run, tmp_path: Path) -> None:
    """In each form that images have, one by one and more than a batch."""
    pixels = np.random.default_rng(0).integers(0, 256, (300, 8, 8), dtype=np.uint8)
    encoder = run.encoder()
    mean, std = (encoder.metadata[name][0] for name in ("mean", "std"))
    with torch.no_grad():
        expected = encoder((torch.from_numpy(pixels)[:, None] / 255 - mean) / std).numpy()
    for row in range(300):
        Image.fromarray(pixels[row]).save(tmp_path / f"{row:03d}.png")
    forms = (
        pixels,
        (pixels, [0, 1, 2] * 100),
        torch.from_numpy(pixels),
        [Image.fromarray(one) for one in pixels],
        tmp_path,
        str(tmp_path / "000.png"),
        Image.fromarray(pixels[0]),
    )
    for images, count in zip(forms, (300, 300, 300, 300, 300, 1, 1), strict=True):
        found = run.embed(images, device="cpu")
        assert found.dtype == np.float32
        assert found.shape == (count, encoder.dim)
        np.testing.assert_allclose(found, expected[:count], rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match="the images are None; give a file, a folder"):
        run.embed(None)
    files = [path.read_bytes() for path in sorted(tmp_path.iterdir())]
    with pytest.raises(UserError, match="image 300 cannot be read as the encoder's training images were"):
        run.embed([*files, b"no image"])
    names, h = embed_images(encoder, tmp_path, device="cpu")
    assert names == [f"{row:03d}.png" for row in range(300)]
    np.testing.assert_allclose(h, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(
        UserError, match="may be one image"
    ):  # a colour image, of which each row would be an image
        run.embed(np.zeros((20, 8, 3), np.uint8))


def test_a_run_stands_for_its_folder(run: atoll.Run) -> None:
    assert os.fspath(run) == str(run.folder)
    assert atoll.Run(run).results == run.results
    images = torch.rand(2, 1, 8, 8)
    assert torch.equal(atoll.load_encoder(run)(images), run.encoder()(images))


WRONG: dict[str, Callable[[atoll.Run], object]] = {
    "^a run's folder is an int; give a path": lambda run: atoll.Run(5),  # type: ignore[arg-type]
    "^a run's folder is a bytes; give a path": lambda run: atoll.simulate(tiny(), out=b"x"),  # type: ignore[arg-type]
    "^the encoder's file is None; give a path": lambda run: atoll.load_encoder(None),  # type: ignore[arg-type]
    "^load_recipe reads .* not a dict; simulate takes a table": lambda run: atoll.load_recipe({}),  # type: ignore[arg-type]
    "^a recipe is a preset's name, .* not a list; name": lambda run: atoll.simulate([], data=7),  # type: ignore[arg-type]
    "^a recipe is a preset's name, .* not None; name": lambda run: atoll.simulate(None, data=7),  # type: ignore[arg-type]
    "^the format is None; known: huggingface, onnx": lambda run: run.export(None),  # type: ignore[arg-type]
    "^k is 2.5; it is a number of neighbours": lambda run: run.neighbours(np.zeros((8, 8), np.uint8), k=2.5),  # type: ignore[arg-type]
    "^k is '3'; it is a number of neighbours": lambda run: run.neighbours(np.zeros((8, 8), np.uint8), k="3"),  # type: ignore[arg-type]
    "^k is True; it is a number of neighbours": lambda run: run.neighbours(
        np.zeros((8, 8), np.uint8), k=True
    ),
    "^among is a list; give a path": lambda run: run.neighbours(np.zeros((8, 8), np.uint8), among=[1]),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("sentence", WRONG)
def test_a_value_of_another_type_gets_a_sentence(run: atoll.Run, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        WRONG[sentence](run)


def test_a_run_is_begun_again_in_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    atoll.simulate(tiny(), folder)
    with pytest.raises(UserError, match=r"already holds a run; .*\(restart=True\), or choose another"):
        atoll.simulate(tiny("seed=1"), folder)
    again = atoll.simulate(tiny("seed=1"), folder, restart=True, callbacks=None)
    other = atoll.simulate(tiny("seed=1"), tmp_path / "other")
    assert [line["loss"] for line in again.metrics[1:]] == [line["loss"] for line in other.metrics[1:]]
    assert same(again.encoder().state_dict(), other.encoder().state_dict())
    with pytest.raises(UserError, match="--restart deletes the run that --resume would continue"):
        atoll.simulate(tiny(), folder, resume=True, restart=True)


def test_it_says_that_a_run_stopped_early(tmp_path: Path) -> None:
    settings = ("train.rounds=5", "train.lr=1e-12", "evaluation.every=1", "evaluation.patience=1")
    run = atoll.simulate(tiny(*settings), tmp_path / "run")
    last = run.metrics[-1]["round"]
    assert last < 5
    assert repr(run).endswith(f"stopped early, {last} of 5 rounds")


def test_an_unfinished_run_names_no_version(tmp_path: Path) -> None:
    class Stop:
        def round(self, record: object, line: object) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        atoll.simulate(tiny(), tmp_path / "run", callbacks=Stop())
    assert "<li>seed 0</li>" in atoll.Run(tmp_path / "run")._repr_html_()


def test_one_colour_image_is_not_taken_for_many_grey_ones(tmp_path: Path) -> None:
    settings = ("data.channels=3", "train.rounds=0", "evaluation.at_end=[]")
    run = atoll.simulate(tiny(*settings), tmp_path / "run")
    image = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    for one in (image, torch.from_numpy(image).permute(2, 0, 1)):
        with pytest.raises(UserError, match=r"of shape .* may be one image; give it as images\[None\]"):
            run.embed(one)
        np.testing.assert_array_equal(run.embed(one[None]), run.embed(Image.fromarray(image)))
