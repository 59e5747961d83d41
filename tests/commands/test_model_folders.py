"""What `atoll export` hands on: each format loaded by the library that it is for, and by Atoll again."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from PIL import Image
from torch import nn

import atoll
from atoll.cli.main import main
from atoll.commands.export import FORMATS, export, provenance
from atoll.commands.model_folders import FOLDERS, model_card
from atoll.commands.run import run_recipe
from atoll.core.errors import UserError
from atoll.core.run_folder import Run
from atoll.data.options import DataOptions
from atoll.data.sources import load_data
from atoll.models import Encoder, ModelOptions, build_encoder, load_encoder, save_encoder
from atoll.recipe.recipe import load_recipe
from tests.harness import TINY, run_tiny

ROOT = Path(__file__).parents[2]
ABOUT = {
    "image_size": 32,
    "channels": 3,
    "mean": [0.4, 0.5, 0.6],
    "std": [0.2, 0.25, 0.3],
    "classes": ["crack", "none"],
    "decoding": {"image_size": 32, "window": "fixed", "window_low": 0.0, "window_high": 65535.0},
}
HF = {"model_type": "vit", "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
CASES = [
    ("timm:vit_tiny_patch16_224", "timm"),
    ("timm:test_resnet", "timm"),
    ("resnet18", "timm"),
    ("hf", "huggingface"),
]


def encoder_of(name: str, folder: Path) -> Encoder:
    if name == "hf":
        pytest.importorskip("transformers", reason="the extra atoll[hf] is not installed")
        (folder / "hf").mkdir()
        (folder / "hf/config.json").write_text(json.dumps({**HF, "intermediate_size": 48, "patch_size": 8}))
        name = f"hf:{folder / 'hf'}"
    if name.startswith("timm:"):
        pytest.importorskip("timm", reason="the extra atoll[timm] is not installed")
    torch.manual_seed(1)
    options = {"stem": "standard"} if name == "resnet18" else {}
    encoder = build_encoder(ModelOptions(encoder=name, **options), 3, 32).eval()
    with torch.no_grad():  # so that BatchNorm's statistics are not the defaults
        for buffer in encoder.buffers():
            if buffer.is_floating_point():
                buffer.add_(0.1)
    encoder.metadata = dict(ABOUT)
    return encoder


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def picture(path: Path) -> np.ndarray:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return pixels


@pytest.mark.parametrize(("name", "format"), CASES)
def test_the_folder_loads_in_its_library_with_equal_outputs(
    name: str, format: str, tmp_path: Path, images: torch.Tensor
) -> None:
    ours = encoder_of(name, tmp_path)
    export(ours, tmp_path / "out", format)
    with torch.no_grad():
        expected = ours(images)
        if format == "timm":
            timm = pytest.importorskip("timm")
            theirs = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True, num_classes=0).eval()
            found = theirs(images)
            config = timm.data.resolve_model_data_config(theirs)
            assert list(config["mean"]) == ABOUT["mean"]
            assert list(config["input_size"]) == [3, 32, 32]
        else:
            from transformers import AutoModel

            theirs = AutoModel.from_pretrained(tmp_path / "out").eval()
            found = theirs(images).last_hidden_state[:, 0]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        again = atoll.load_encoder(tmp_path / "out")
        torch.testing.assert_close(again(images), expected, atol=0, rtol=0)
    assert again.metadata == ABOUT


def test_hugging_faces_processor_prepares_images_as_atoll_does(tmp_path: Path) -> None:
    ours = encoder_of("hf", tmp_path)
    export(ours, tmp_path / "out", "huggingface")
    from transformers import AutoImageProcessor

    pixels = picture(tmp_path / "one.png")
    square = Image.fromarray(pixels).crop((9, 4, 41, 36))  # of the decoded size: nothing is resized
    square.save(tmp_path / "square.png")
    processor = AutoImageProcessor.from_pretrained(tmp_path / "out")
    theirs = processor(square, return_tensors="pt")["pixel_values"]
    mean, std = (torch.tensor(ABOUT[key])[:, None, None] for key in ("mean", "std"))
    expected = (torch.from_numpy(np.asarray(square).copy()).permute(2, 0, 1) / 255 - mean) / std
    torch.testing.assert_close(theirs[0], expected, atol=1e-5, rtol=0)
    found = tmp_path / "h.npz"
    assert main(["embed", str(tmp_path / "out"), str(tmp_path / "square.png"), "-o", str(found)]) == 0
    with torch.no_grad():
        np.testing.assert_allclose(np.load(found)["embeddings"], ours(theirs).numpy(), atol=1e-5)


@pytest.mark.parametrize("format", sorted(FORMATS))
def test_a_file_holds_what_its_user_must_know_and_embeds_equally(
    format: str, tmp_path: Path, images: torch.Tensor
) -> None:
    torch.manual_seed(0)
    ours = build_encoder(ModelOptions(encoder="resnet-narrow", width=4), 3, 32).eval()
    ours.metadata = dict(ABOUT)
    path = tmp_path / f"model.{format}"
    if format == "onnx":
        pytest.importorskip("onnxscript", reason="the extra atoll[onnx] is not installed")
        pytest.importorskip("onnxruntime", reason="the extra atoll[onnx] is not installed")
    export(ours, path, format, {"method": "SSD"})
    about = {**ABOUT, "provenance": {"method": "SSD"}}
    assert read_with_its_library(path, images)[0] == about
    with torch.no_grad():
        expected = ours(images)
        torch.testing.assert_close(read_with_its_library(path, images)[1], expected, atol=1e-5, rtol=0)
        again = atoll.load_encoder(path)
        torch.testing.assert_close(again(images), expected, atol=1e-5, rtol=0)
        assert again(images[:1]).shape == (1, ours.dim)
    assert (again.metadata, again.dim) == (about, ours.dim)
    picture(tmp_path / "one.png")
    save_encoder(tmp_path / "encoder.safetensors", ours, ABOUT)
    rows = []
    for encoder in (path, tmp_path / "encoder.safetensors"):
        assert main(["embed", str(encoder), str(tmp_path / "one.png"), "-o", str(tmp_path / "h.npz")]) == 0
        rows.append(np.load(tmp_path / "h.npz")["embeddings"])
    np.testing.assert_allclose(rows[0], rows[1], atol=1e-5)


@pytest.mark.parametrize("format", ["onnx", "pt2"])
def test_a_program_of_a_vit_takes_any_number_of_images(format: str, tmp_path: Path) -> None:
    if format == "onnx":
        pytest.importorskip("onnxscript", reason="the extra atoll[onnx] is not installed")
        pytest.importorskip("onnxruntime", reason="the extra atoll[onnx] is not installed")
    torch.manual_seed(0)
    ours = build_encoder(ModelOptions(encoder="vit-tiny", width=64, depth=1), 3, 32).eval()
    ours.metadata = dict(ABOUT)
    path = tmp_path / f"model.{format}"
    export(ours, path, format, {})
    again = load_encoder(path)
    for count in (1, 2, 5):
        images = torch.randn(count, 3, 32, 32)
        with torch.no_grad():
            torch.testing.assert_close(again(images), ours(images), atol=1e-5, rtol=0)


class CountsImages(nn.Module):
    """An encoder whose code reads the size of a batch as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.layer(images.mean((2, 3))).reshape(len(images), -1)
        return h


@pytest.mark.parametrize("format", ["onnx", "pt2"])
def test_a_program_that_would_take_two_images_alone_is_refused(
    format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if format == "onnx":
        pytest.importorskip("onnxscript", reason="the extra atoll[onnx] is not installed")
    ours = build_encoder(ModelOptions(encoder=f"{__name__}:CountsImages"), 3, 32).eval()
    save_encoder(tmp_path / "encoder.safetensors", ours, ABOUT)
    out = tmp_path / f"model.{format}"
    asked = ["export", str(tmp_path / "encoder.safetensors"), "--format", format, "-o", str(out)]
    assert main(asked) == 2
    assert "write images.shape[0] in place of len(images)" in capsys.readouterr().err
    assert not out.exists()


def read_with_its_library(path: Path, images: torch.Tensor) -> tuple[Any, torch.Tensor]:
    if path.suffix == ".pt2":
        extra = {"atoll.json": ""}
        program = torch.export.load(path, extra_files=extra)
        assert program.graph_signature.user_inputs == ("images",)
        return json.loads(extra["atoll.json"]), program.module()(images)
    if path.suffix == ".onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(path)
        assert [one.name for one in (*session.get_inputs(), *session.get_outputs())] == [
            "images",
            "representations",
        ]
        (found,) = session.run(None, {"images": images.numpy()})
        return json.loads(session.get_modelmeta().custom_metadata_map["atoll"]), torch.from_numpy(found)
    with safetensors.safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["atoll"])
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    plain = build_encoder(ModelOptions(encoder="resnet-narrow", width=4), 3, 32).eval()
    plain.load_state_dict(state)
    return about["metadata"], plain(images)


def test_a_runs_export_says_where_it_comes_from_and_shows_no_paths(tmp_path: Path) -> None:
    settings = [setting for setting in TINY if "width" not in setting]
    wide = ["method.name=ssd", "model.encoder=resnet18", "model.stem=standard"]
    run = run_recipe(load_recipe("digits", [*settings, *wide]), tmp_path / "run")
    assert main(["export", str(run.folder), "--format", "timm"]) == 0
    folder = run.folder / "encoder-export-timm"
    said = provenance(Run(run.folder))
    assert said["results"]["knn/accuracy"] == run.results["knn/accuracy"]
    assert atoll.load_encoder(folder).metadata["provenance"] == said
    card = (folder / "README.md").read_text()
    for words in (
        "library_name: timm",
        "SSD, 2 rounds, seed 0",
        "digits, at most 160 images, 4 clients, iid; 4 clients.",
        "| knn/k | 20 |",
        f"{run.results['knn/accuracy']:.6g}",
        "test split",
    ):
        assert words in card
    for path in folder.iterdir():
        assert str(tmp_path).encode() not in path.read_bytes()


def test_what_has_no_such_format_says_so(tmp_path: Path) -> None:
    narrow = build_encoder(ModelOptions(encoder="resnet-narrow", width=4), 3, 32)
    narrow.metadata = dict(ABOUT)
    for format in FOLDERS:
        with pytest.raises(UserError, match="choose the format"):
            export(narrow, tmp_path / "out", format)
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match=r"a folder without an encoder: there is no config\.json in it"):
        atoll.load_encoder(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="not written by atoll export"):
        atoll.load_encoder(tmp_path)
    for name in ("bad.pt2", "bad.onnx"):
        (tmp_path / name).write_bytes(b"nothing")
        if name.endswith("onnx"):
            pytest.importorskip("onnxruntime")
        with pytest.raises(UserError, match="export it again"):
            atoll.load_encoder(tmp_path / name)


class Touch:
    """An object that makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("place", ["a weight", "an object"])
def test_a_program_with_a_pickle_runs_none_of_its_code(place: str, tmp_path: Path) -> None:
    encoder = build_encoder(ModelOptions(encoder="resnet-narrow", width=4), 3, 32).eval()
    encoder.metadata = dict(ABOUT)
    path, touched = tmp_path / "model.pt2", tmp_path / "touched"
    export(encoder, path, "pt2", {})
    reader = torch._C.PyTorchFileReader(str(path))
    records = {name: reader.get_record(name) for name in reader.get_all_records()}
    torch.save(Touch(touched), tmp_path / "pickle")
    kind = "weights" if place == "a weight" else "constants"
    whole = f"data/{kind}/model.pt"  # of older versions of PyTorch
    if whole in records:
        records[whole] = (tmp_path / "pickle").read_bytes()
    else:
        weights = json.loads(records["data/weights/model_weights_config.json"])
        name, entry = next(iter(weights["config"].items()))
        entry["use_pickle"] = True
        if place == "a weight":
            records["data/weights/model_weights_config.json"] = json.dumps(weights).encode()
            records[f"data/weights/{entry['path_name']}"] = (tmp_path / "pickle").read_bytes()
        else:
            entry |= {"path_name": "opaque_obj_0", "tensor_meta": None, "is_param": False}
            constants = {"config": {name: entry}}
            records["data/constants/model_constants_config.json"] = json.dumps(constants).encode()
            records["data/constants/opaque_obj_0"] = pickle.dumps(Touch(touched))
    writer = torch._C.PyTorchFileWriter(str(path))
    for name, record in records.items():
        if not name.startswith(".data") and name != "byteorder":  # which the writer adds by itself
            writer.write_record(name, record, len(record))
    writer.write_end_of_file()
    with pytest.raises(UserError, match="export it again"):
        atoll.load_encoder(path)
    assert not touched.exists()


def page_blocks() -> list[str]:
    """The page's code."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs/export.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK", "RGBA"])
def test_the_page_prepares_images_as_atoll_does(mode: str, tmp_path: Path) -> None:
    """To the grey level, also where an odd number of pixels is cropped."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (97, 180, 3), dtype=np.uint8)
    image = Image.fromarray(pixels).convert(mode)
    image.save(folder / "image.tif")
    (code,) = (block for block in page_blocks() if "def prepared" in block)
    shared: dict[str, Any] = {}
    exec(code, shared)
    options = DataOptions(source="images", path=str(folder), image_size=32, channels=3, test_fraction=0.0)
    ours = load_data(options, 0).train.images.gather(torch.tensor([0]))
    about = {"image_size": 32, "channels": 3, "mean": [0.0] * 3, "std": [1.0] * 3}
    theirs = shared["prepared"](Image.open(folder / "image.tif"), about)
    assert torch.equal((255 * theirs).round(), ours.float())


def test_the_pages_loaders_run_as_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block runs in a folder with the files that it names; all give the same representations."""
    for library in ("timm", "transformers", "onnxscript", "onnxruntime"):
        pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    picture(tmp_path / "image.png")
    ours = encoder_of("timm:vit_tiny_patch16_224", tmp_path)
    hf = encoder_of("hf", tmp_path)
    for format in (*FORMATS, "timm"):
        export(ours, Path(f"encoder-export.{format}" if format in FORMATS else "encoder-export-timm"), format)
    export(hf, Path("encoder-export-huggingface"), "huggingface")
    blocks, shared, found = page_blocks(), dict[str, Any](), []
    for block in blocks:
        exec(block, shared)
        if "h" in shared:
            encoder = hf if "huggingface" in block else ours
            with torch.no_grad():
                expected = encoder(shared["images"])
            torch.testing.assert_close(torch.as_tensor(shared.pop("h")), expected, atol=1e-5, rtol=0)
            found.append(block)
    assert len(found) == 6


@pytest.mark.parametrize("name", ["resnet18", "resnet-narrow", "timm:test_resnet"])
def test_a_refused_format_names_those_that_write_the_encoder(name: str, tmp_path: Path) -> None:
    encoder = encoder_of(name, tmp_path)
    with pytest.raises(UserError, match="is no model of Hugging Face's") as refused:
        export(encoder, tmp_path / "out", "huggingface")
    named = re.split(", | or ", str(refused.value).rpartition("choose the format ")[2])
    assert ("timm" in named) == (name != "resnet-narrow")
    for format in named:
        export(encoder, tmp_path / f"out.{format}", format)


def test_a_folder_of_other_files_is_not_written_to(tmp_path: Path) -> None:
    encoder = encoder_of("resnet18", tmp_path)
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(UserError, match=r"has a README\.md that no export wrote"):
        export(encoder, tmp_path, "timm")
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
    for _ in range(2):  # an earlier export is replaced
        export(encoder, tmp_path / "new", "timm")
    assert "atoll" in json.loads((tmp_path / "new" / "config.json").read_text())


@pytest.mark.parametrize(("method", "tagged"), [("ssd", True), ("fed_sl", False), ("supcon", False)])
def test_only_an_encoder_that_needed_no_labels_is_called_self_supervised(
    tmp_path: Path, method: str, tagged: bool
) -> None:
    run = run_tiny(tmp_path / "run", f"method.name={method}", "train.rounds=1", "evaluation.at_end=[]")
    about = provenance(Run(run.folder))
    encoder = load_encoder(run.encoder_path)
    encoder.metadata = {**encoder.metadata, "provenance": about}
    assert ("- self-supervised-learning" in model_card(encoder, "timm", "")) == tagged
