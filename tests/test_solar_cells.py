"""The solar cells' example: its export, its runs at a tiny size, and its page."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import atoll
import board
import solar_cells as tool
from atoll.commands.data import load_partition
from atoll.recipe.recipe import load_recipe
from atoll.report.paired import signed

ROOT = Path(__file__).parents[1]
GRADES = {"0.0": 0, "0.3333333333333333": 1, "0.6666666666666666": 2, "1.0": 3}
TINY = (
    "data.image_size=8",
    "model.encoder=resnet-narrow",
    "model.width=4",
    "model.projector_hidden=[8]",
    "train.epochs=1",
    "train.batch_size=8",
    "evaluation.map_points=0",
    "evaluation.max_epochs=1",
    "evaluation.knn_k=3",
)


@pytest.fixture(scope="module")
def export():
    spec = importlib.util.spec_from_file_location(
        "export_solar_cells", ROOT / "examples/solar_cells/export.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def cells(tmp_path):
    """A folder like elpv-dataset's: twelve cells of each grade and type, darker with the defect."""
    random, lines = np.random.default_rng(0), []
    (tmp_path / "package/images").mkdir(parents=True)
    for kind in ("mono", "poly"):
        for share, grade in GRADES.items():
            for _ in range(12):
                name = f"images/cell{len(lines) + 1:04d}.png"
                pixels = random.integers(0, 60, (10, 10)) + 60 * (3 - grade)
                Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / "package" / name)
                lines.append(f"{name}  {share:<18}  {kind}")
    (tmp_path / "package/labels.csv").write_text("\n".join(lines) + "\n")
    return tmp_path / "package"


def test_each_cell_lies_in_the_folder_of_its_type_and_grade(export, cells, tmp_path, monkeypatch):
    assert export.export_images(cells, tmp_path / "images") == 96
    for line in (cells / "labels.csv").read_text().splitlines():
        name, share, kind = line.split()
        (found,) = (tmp_path / "images").rglob(Path(name).name)
        assert found.read_bytes() == (cells / name).read_bytes()
        assert (found.parts[-3], found.parts[-2][0]) == (kind, str(GRADES[share]))
    monkeypatch.setenv("ATOLL_DATA", str(tmp_path))
    splits, partition = load_partition(load_recipe(str(tool.RECIPE), ["data.image_size=8"]))
    assert splits.train.classes == list(export.GRADES)
    assert partition.names == ["mono", "poly"]
    assert (len(splits.train), len(splits.test)) == (72, 24)


def test_weights_get_timms_names_and_lose_the_classifier(export, tmp_path):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model(export.ENCODER)
    state = {f"other.{i}": tensor for i, tensor in enumerate(model.state_dict().values())}
    torch.save(state, tmp_path / "theirs.pth")
    export.export_weights(tmp_path / "theirs.pth", tmp_path / "ours.safetensors")
    ours = timm.create_model(export.ENCODER, num_classes=0)
    ours.load_state_dict(load_file(tmp_path / "ours.safetensors"))
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        features = ours.eval()(images)
        torch.testing.assert_close(model.eval().get_classifier()(features), model(images))


def test_the_renamed_network_computes_what_its_own_library_computes(export, tmp_path):
    theirs = pytest.importorskip("efficientnet_lite_pytorch", reason="the example's package, not ours")
    timm = pytest.importorskip("timm")
    original = theirs.EfficientNet.from_name("efficientnet-lite0").eval()
    torch.save(original.state_dict(), tmp_path / "theirs.pth")
    export.export_weights(tmp_path / "theirs.pth", tmp_path / "ours.safetensors")
    ours = timm.create_model(export.ENCODER, num_classes=0).eval()
    ours.load_state_dict(load_file(tmp_path / "ours.safetensors"))
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(original._fc(ours(images)), original(images), atol=1e-5, rtol=0)


def study(folder: Path) -> tool.Study:
    whole = tool.Study()
    kept = {
        **whole.table,
        "seeds": [1],
        "rows": {name: whole.table["rows"][name] for name in ("untrained", "scratch")},
        "fine_tunings": ["finetune-50-labels"],
    }
    lines = whole.table["supervised"]
    kept["supervised"] = {**lines, "labels": {"50": ["data.limit=50", "train.epochs=4"]}}
    return tool.Study(folder / "records.json", kept)


@pytest.mark.filterwarnings("ignore:.*labels are asked for")
@pytest.mark.filterwarnings("ignore:kNN needs")
def test_a_tiny_study_runs_is_continued_and_fills_its_table(export, cells, tmp_path, monkeypatch):
    export.export_images(cells, tmp_path / "images")
    monkeypatch.setenv("ATOLL_DATA", str(tmp_path))
    one, short = study(tmp_path), [*TINY, "train.rounds=1"]
    entries = {entry.name: entry for entry in one.entries()}
    assert list(entries) == ["untrained-seed1", "scratch-seed1", "federated-50-seed1", "alone-50-seed1"]

    class Stop:
        stop = True

        def begin(self, federation, server): ...
        def step(self, images): ...
        def round(self, record, line): ...

    for name, entry in entries.items():
        settings = TINY if name.startswith("untrained") else short
        if one.row(entry).get("fine_tune"):  # stopped after the fine-tuning, which is then not repeated
            with pytest.raises(board.StopAsked):
                tool.make(one, entry, tmp_path / "work", settings, Stop())
            monkeypatch.setattr(tool, "evaluate_run", None)
        one.save(tool.make(one, entry, tmp_path / "work", settings))
        monkeypatch.undo()
        monkeypatch.setenv("ATOLL_DATA", str(tmp_path))
    records = json.loads(one.results.read_text())
    assert sorted(records) == sorted(entries)
    assert str(tmp_path) not in one.results.read_text()
    assert records["scratch-seed1"]["megabytes"] > records["untrained-seed1"]["megabytes"] == 0
    assert records["scratch-seed1"]["evaluation"]["finetune-50-labels/labels"] == 50
    assert "by_model" in records["alone-50-seed1"]["evaluation"]
    page = tool.made(one)
    found = records["scratch-seed1"]["evaluation"]
    numbers = [f"{100 * found[key]:.1f}" if key in found else "–" for key in tool.MEASURES.values()]
    assert numbers.count("–") == 2  # fine-tuning on 100 and on 500 labels
    assert f"| from scratch | {' | '.join(numbers)} | 1 |" in page
    (untrained,) = one.measured("untrained", "knn/accuracy").values()
    assert f"| kNN | {signed(100 * found['knn/accuracy'] - untrained)} |" in page
    spent = atoll.Run(tmp_path / "work" / "scratch-seed1").metrics[1]["seconds"]
    assert records["scratch-seed1"]["minutes"] == round(spent / 60, 1)
    cost = (records["scratch-seed1"][key] for key in ("megabytes", "minutes"))
    assert f"| from scratch | {' | '.join(f'{one:.1f}' for one in cost)} |" in page
    (line,) = (line for line in page.splitlines() if line.startswith("| 50 labels | alone"))
    shown = [f"{100 * records['alone-50-seed1']['evaluation'][key]:.1f}" for key in tool.SUPERVISED.values()]
    assert line == f"| 50 labels | alone | {' | '.join(shown)} | 1 |"


def test_minutes_are_those_of_the_median_round():
    rounds = [{"round": 0}, {"seconds": 60.0}, {"seconds": 5000.0}, {"seconds": 90.0}]
    assert tool.minutes(rounds) == 4.5
    assert tool.minutes(rounds[:1]) == 0


def test_every_row_is_a_recipe_that_exists(tmp_path, monkeypatch):
    pytest.importorskip("timm")
    for entry in tool.Study().entries():
        recipe = load_recipe(entry.recipe, [*entry.settings, f"seed={entry.seed}"])
        assert recipe.seed == entry.seed


def test_the_page_is_what_the_records_say():
    text = tool.PAGE.read_text("utf-8")
    assert tool.filled(text, tool.made(tool.Study()), tool.BEGIN, tool.END) == text
