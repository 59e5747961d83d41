from __future__ import annotations

import io
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from atoll.cli.main import main
from atoll.cli.parser import make_parser
from atoll.commands.check import check_run
from atoll.commands.detect import detect, parse_options, prepare_detection
from atoll.core import tree
from atoll.core.errors import RunError, UserError
from atoll.core.run_folder import Run
from atoll.models import ModelOptions, build_encoder, save_encoder
from atoll.recipe.recipe import load_recipe
from tests.shapes import SIDE, draw, write_coco, write_parquet

SMALL = [
    "size=48",
    "max_size=48",
    "fpn_width=8",
    "head_width=16",
    "rois=16",
    "epochs=2",
    "batch_size=3",
    "save_every=1",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder, and images with boxes and with masks."""
    torch.set_num_threads(1)
    root: Path = tmp_path_factory.mktemp("detect")
    torch.manual_seed(1)
    encoder = build_encoder(ModelOptions(encoder="resnet-narrow", width=4, stem="strided"), 3, 32)
    save_encoder(root / "encoder.safetensors", encoder, {"mean": [0.5] * 3, "std": [0.25] * 3})
    write_coco(root / "shapes")
    write_parquet(root / "boxes")
    return root


def run(folder: Path, out: Path, *settings: str, progress: Any = None, **more: Any) -> list[dict[str, Any]]:
    options = parse_options([*SMALL, *settings])
    data = str(folder / "shapes")
    job = prepare_detection(folder / "encoder.safetensors", data, options, out=out, **more)
    return detect(job, progress)


class Killed:
    """Interrupts a training after so many steps."""

    def __init__(self, after: int) -> None:
        self.left = after

    def begin(self, title: str, done: int, total: int, unit: str) -> None:
        pass

    def advance(self, amount: int, facts: str = "") -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt


def lasting(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != "cpu_seconds"}


def test_a_killed_detection_continues_to_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    whole = run(folder, tmp_path / "whole", "masks=true")
    for steps in (0, 3, 4):  # the last one is killed as it measures
        out = tmp_path / f"killed-{steps}"
        with pytest.raises(KeyboardInterrupt):
            run(folder, out, "masks=true", progress=Killed(steps))
        assert not (out / "pretrained-seed0.json").exists()
        continued = run(folder, out, "masks=true", "save_every=3")
        weights = [path / "pretrained-seed0.safetensors" for path in (tmp_path / "whole", out)]
        assert weights[0].read_bytes() == weights[1].read_bytes()
        assert [lasting({**one, "options": {}}) for one in continued] == [
            lasting({**one, "options": {}}) for one in whole
        ]
        assert not list(out.glob("*.checkpoint.*"))


def test_a_finished_seed_is_not_repeated_and_a_further_one_is_added(folder: Path, tmp_path: Path) -> None:
    first = run(folder, tmp_path)
    both = run(folder, tmp_path, seeds=2)
    assert both[0] == first[0]
    assert [record["seed"] for record in both] == [0, 1]
    assert Run(tmp_path).read_json("pretrained-seed1.json") == both[1]


def test_damage_is_found_by_a_continued_detection_and_by_check(folder: Path, tmp_path: Path) -> None:
    Run(tmp_path).write("recipe.toml", load_recipe("digits").to_toml())
    out = tmp_path / "detection" / "shapes"
    run(folder, out)
    assert (check_run(Run(tmp_path)).files, check_run(Run(tmp_path)).damaged) == (3, [])
    with pytest.raises(KeyboardInterrupt):
        run(folder, out, progress=Killed(2), scratch=True)
    for name in (
        "pretrained-seed0.json",
        "pretrained-seed0.safetensors",
        "scratch-seed0.checkpoint.safetensors",
    ):
        data = bytearray((out / name).read_bytes())
        data[-40] ^= 1
        (out / name).write_bytes(data)
    found = check_run(Run(tmp_path)).damaged
    assert len(found) == 3
    assert all("seed0" in sentence for sentence in found)
    with pytest.raises(
        UserError, match=r"checkpoint.* delete it, and the training of this seed begins again"
    ):
        run(folder, out, scratch=True)
    with pytest.raises(UserError, match=r"pretrained-seed0\.json"):
        run(folder, out)


def test_from_scratch_only_the_encoders_weights_differ(folder: Path, tmp_path: Path) -> None:
    for scratch in (False, True):
        with pytest.raises(KeyboardInterrupt):  # after one step with a rate of nearly zero
            run(folder, tmp_path, "lr=1e-12", progress=Killed(1), scratch=scratch)
    pretrained, scratch_start = (
        tree.load(tmp_path / f"{name}-seed0.checkpoint.safetensors")["training"]["model"]
        for name in ("pretrained", "scratch")
    )
    encoder = load_file(folder / "encoder.safetensors")
    for name, weights in pretrained.items():
        alike = torch.allclose(weights.float(), scratch_start[name].float(), atol=1e-6)
        if name.startswith("backbone.encoder.") and weights.ndim == 4:
            torch.testing.assert_close(weights, encoder[name.removeprefix("backbone.encoder.")])
            assert not alike, name
        elif not name.startswith("backbone.encoder."):
            assert alike, name


@pytest.mark.parametrize("setting", ["epochs=3", "lr=0.01", "fraction=0.5"])
def test_results_of_other_options_are_not_mixed(folder: Path, tmp_path: Path, setting: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(folder, tmp_path, progress=Killed(2))
    key = setting.partition("=")[0]
    with pytest.raises(UserError, match=f"was made with options.{key} = .*choose another --out"):
        run(folder, tmp_path, setting)
    run(folder, tmp_path)
    with pytest.raises(UserError, match=f"was made with options.{key} = "):
        run(folder, tmp_path, setting)


def test_a_training_that_diverged_is_repeated_with_a_lower_rate(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="diverged; lower lr"):
        run(folder, tmp_path, "lr=1e6", "warmup=0", "epochs=20")
    run(folder, tmp_path, "lr=0.01")
    assert not list(tmp_path.glob("*.checkpoint.*"))


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda data: data[: len(data) // 2], r"100\.png .* cannot be decoded: .* \(2 such images\)$"),
        (lambda data: _png(SIDE + 8), r"100\.png .* has 104×104 pixels and is annotated as 96×96.* \(2 such"),
    ],
    ids=["truncated", "resized"],
)
def test_an_image_that_cannot_be_used_is_refused_before_the_training(
    folder: Path, tmp_path: Path, split: str, damage: Callable[[bytes], bytes], sentence: str
) -> None:
    data = write_coco(tmp_path / "data")
    for name in ("100.png", "101.png"):
        file = data / split / name
        file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(UserError, match=sentence):
        prepare_detection(folder / "encoder.safetensors", str(data), parse_options(SMALL), out=tmp_path)


def _png(side: int) -> bytes:
    file = io.BytesIO()
    draw(5, side)[0].save(file, "PNG")
    return file.getvalue()


def test_a_training_continues_after_a_test_image_was_replaced(folder: Path, tmp_path: Path) -> None:
    def detected(out: str, progress: Any = None) -> list[dict[str, Any]]:
        options = parse_options(SMALL)
        job = prepare_detection(
            folder / "encoder.safetensors", str(tmp_path / "data"), options, out=tmp_path / out
        )
        return detect(job, progress)

    data = write_coco(tmp_path / "data")
    with pytest.raises(KeyboardInterrupt):
        detected("killed", Killed(2))
    (data / "test" / "100.png").write_bytes(_png(SIDE))
    assert lasting(detected("killed")[0]) == lasting(detected("whole")[0])
    with pytest.raises(KeyboardInterrupt):
        detected("other", Killed(2))
    (data / "train" / "100.png").write_bytes(_png(SIDE))
    with pytest.raises(UserError, match=r"was made with images\.train"):
        detected("other")


def test_results_of_another_encoder_are_not_mixed(folder: Path, tmp_path: Path) -> None:
    run(folder, tmp_path)
    other = build_encoder(ModelOptions(encoder="resnet-narrow", width=4, stem="strided"), 3, 32)
    save_encoder(tmp_path / "other.safetensors", other, {})
    job = prepare_detection(
        folder / "encoder.safetensors", str(folder / "shapes"), parse_options(SMALL), out=tmp_path
    )
    with pytest.raises(UserError, match=r"was made with encoder\.weights"):
        detect(replace(job, encoder_path=tmp_path / "other.safetensors"))


def test_the_record_says_what_was_measured(folder: Path, tmp_path: Path) -> None:
    (record,) = run(folder, tmp_path, "masks=true")
    assert record["protocol"] == "detection"
    assert (record["train_images"], record["test_images"], record["test_objects"]) == (4, 2, 4)
    assert record["steps"] == 4
    assert len(record["losses"]) == 2
    assert record["bbox"].keys() == record["segm"].keys() >= {"AP", "AP50", "AP75", "AR_100", "classes"}
    assert record["bbox"]["classes"].keys() == {"square", "disk"}
    assert record["options"]["size"] == 48
    assert record["encoder"]["encoder"] == "resnet-narrow"
    assert record["version"]


def test_the_command_writes_beside_the_encoder_and_prints_a_table(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["detect", str(folder / "encoder.safetensors"), str(folder / "boxes"), "--scratch"]
    assert main([*arguments, "--set", *SMALL]) == 0
    printed = capsys.readouterr().out
    assert "scratch-seed0: 4 of 4 steps to do" in printed
    assert "AP50, boxes %" in printed
    assert (folder / "detection" / "boxes" / "scratch-seed0.json").is_file()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["masks=true"], "has a box and no segmentation"),
        (["epoch=3"], "unknown key 'epoch'; did you mean 'epochs'"),
        (["epochs=none"], "epochs = 'none' is not a whole number"),
        (["train_split=night"], "no annotated images of the split 'night'"),
    ],
)
def test_a_users_mistake_is_a_sentence(
    folder: Path, settings: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["detect", str(folder / "encoder.safetensors"), str(folder / "boxes"), "--set", *settings]
    assert main(arguments) == 2
    assert sentence in capsys.readouterr().err


def test_the_benchmarks_commands_are_valid() -> None:
    script = (Path(__file__).parents[2] / "benchmarks" / "detection.sh").read_text()
    lines = script.replace("$method", "dec_sl").replace("$seed", "17").splitlines()
    commands = [shlex.split(line) for line in lines if line.strip().startswith("atoll ")]
    assert [command[1] for command in commands] == ["run", "detect", "detect", "report"]
    run, pretrained, scratch, _ = (make_parser().parse_args(command[1:]) for command in commands)
    load_recipe(run.recipe, run.set)
    assert parse_options(pretrained.set) == parse_options(scratch.set)
    assert (pretrained.scratch, scratch.scratch) == (False, True)


def test_without_pycocotools_nothing_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pycocotools.cocoeval", None)
    with pytest.raises(UserError, match=r"pip install '\.\[detect\]'"):
        prepare_detection(folder / "nothing", "nowhere", parse_options([]))
