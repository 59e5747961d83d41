"""The commands that measure and use an encoder: embed, export, evaluate, neighbours."""

import csv
import io
import json
import os
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from atoll.cli.main import main
from atoll.core.errors import UserError
from tests.harness import run_tiny

# Which values they hold is said in a line.
SIXTEEN_BITS = pytest.mark.filterwarnings("ignore:.*images of more than 8 bits hold values:UserWarning")


def run(*arguments):
    return main([*map(str, arguments)])


def test_embed_and_export(finished, images, tmp_path, capsys):
    assert run("embed", finished, images, "-o", tmp_path / "e.npz") == 0
    with np.load(tmp_path / "e.npz") as file:
        names, h = file["names"], file["embeddings"]
    assert list(names) == [f"{i:02d}.png" for i in range(40)]
    for ending in ("csv", "parquet"):
        assert run("embed", finished, images, "-o", tmp_path / f"e.{ending}") == 0
    with (tmp_path / "e.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["name", *(f"h{i}" for i in range(h.shape[1]))]
    assert [row[0] for row in rows] == list(names)
    np.testing.assert_array_equal(np.array([row[1:] for row in rows]).astype(np.float32), h)
    table = pq.read_table(tmp_path / "e.parquet")
    assert table["name"].to_pylist() == list(names)
    np.testing.assert_array_equal(np.array(table["embedding"].to_pylist(), np.float32), h)
    assert run("export", finished, "--format", "pt2", "-o", tmp_path / "e.pt2") == 0
    program = torch.export.load(io.BytesIO((tmp_path / "e.pt2").read_bytes())).module()
    import atoll

    x = torch.rand(5, 1, 8, 8)
    encoder = atoll.load_encoder(finished / "encoder.safetensors")
    torch.testing.assert_close(program(x), encoder(x))
    assert run("export", finished, "--format", "safetensors", "-o", tmp_path / "w.safetensors") == 0
    assert run("export", finished, "--format", "tflite") == 2
    assert run("embed", finished, images, "-o", tmp_path / "e.xlsx") == 2


@pytest.mark.parametrize("more", [[], ["--on-corrupt", "skip"]])
def test_a_file_of_another_kind_is_called_so_and_not_damaged(finished, tmp_path, capsys, more):
    (tmp_path / "photos.parquet").write_bytes(b"PAR1" + bytes(50) + b"PAR1")
    assert run("embed", finished, tmp_path / "photos.parquet", "-o", tmp_path / "h.npz", *more) == 2
    assert "photos.parquet is no image file; give one (.bmp, " in capsys.readouterr().err


def test_a_program_computes_on_the_cpu_alone(finished, images, tmp_path, capsys, monkeypatch):
    program, out = tmp_path / "encoder.pt2", tmp_path / "h.npz"
    assert run("export", finished, "--format", "pt2", "-o", program) == 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert run("embed", program, images, "-o", out) == 0
    assert np.load(out)["embeddings"].shape[0] == 40
    assert run("embed", program, images, "-o", out, "--device", "cuda") == 2
    assert "--device is cuda, and a .pt2 or .onnx file computes on the CPU" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["embed", "neighbours"])
@pytest.mark.parametrize(
    ("device", "reason"), [("cuda", "PyTorch finds no GPU"), ("tpu", "use auto, cpu or")]
)
def test_a_device_that_is_not_there_is_refused(
    finished, images, tmp_path, capsys, monkeypatch, command, device, reason
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    more = [images, "-o", tmp_path / "h.npz"] if command == "embed" else []
    assert run(command, finished, *more, "--device", device) == 2
    assert reason in capsys.readouterr().err


def test_embedding_the_training_pixels_is_what_evaluation_saw(finished, tmp_path):
    """`atoll embed` on image files agrees with the federation's own un-augmented pass."""
    from atoll.commands.embed import embed_images
    from atoll.core.tree import load
    from atoll.engines.federation import Federation
    from atoll.evaluation import embed
    from atoll.recipe.recipe import load_recipe

    federation = Federation(load_recipe(finished / "recipe.toml"))
    pixels = federation.splits.test.images.gather(torch.arange(6))
    folder = tmp_path / "images"
    folder.mkdir()
    for i, image in enumerate(pixels):
        Image.fromarray(image[0].numpy()).save(folder / f"{i}.png")
    import atoll

    _, h = embed_images(atoll.load_encoder(finished / "encoder.safetensors"), folder)
    newest = max((finished / "checkpoints").glob("round-*.safetensors"))
    encoder = federation.load(load(newest)["state"]["models"]["global"])
    expected = embed(encoder, federation.views.plain, federation.splits.test.images)[:6]
    torch.testing.assert_close(h, expected, rtol=1e-5, atol=1e-6)


@SIXTEEN_BITS
@pytest.mark.parametrize("window", ["data.window=per-image", "data.window_high=20000"])
def test_embedding_reads_image_files_as_training_did(images, tmp_path, window):
    """The window of 16-bit images, and the size that they are stored at before views of another are made."""
    from atoll.commands.embed import embed_images
    from atoll.engines.federation import Federation
    from atoll.evaluation import embed
    from atoll.recipe.recipe import load_recipe

    folder = shutil.copytree(images, tmp_path / "images")
    (folder / "folder.png").mkdir()
    settings = ["data.source=images", f"data.path={folder}", "data.test_fraction=0", window]
    sizes = ["data.image_size=12", "views.size=8", "train.rounds=0"]
    done = run_tiny(tmp_path / "run", *settings, *sizes)
    federation = Federation(load_recipe(done.recipe_path))
    import atoll

    encoder = atoll.load_encoder(done.encoder_path)
    names, h = embed_images(encoder, folder)
    assert len(names) == 40
    expected = embed(encoder, federation.views.plain, federation.splits.train.images)
    torch.testing.assert_close(h, expected, rtol=1e-5, atol=1e-6)
    os.replace(folder / names[0], os.fsencode(folder) + b"/\xe9.png")
    assert r"\xe9.png" in embed_images(encoder, folder)[0]
    os.mkfifo(folder / "pipe.png")
    with pytest.raises(UserError, match=r"pipe\.png is a pipe, a socket or a device"):
        embed_images(encoder, folder)


def test_embeddings_keep_the_names_of_files_so_that_they_can_be_joined(finished, tmp_path, capsys):
    folder = tmp_path / "images"
    folder.mkdir()
    given = ["a\u200db", "a\u200cb", "a\u00adb", "a\tb", "a\nb", "a\rb", 'a"b', "a\\b", "e\u0301"]
    for name in given:
        Image.new("L", (8, 8)).save(folder / f"{name}.png")
    shutil.copy(folder / "a\tb.png", os.fsencode(folder) + b"/\xe9.png")
    expected = sorted([*(f"{name}.png" for name in given), r"\xe9.png"])
    for suffix in ("npz", "csv", "parquet"):
        assert run("embed", finished, folder, "-o", tmp_path / f"h.{suffix}") == 0
    assert sorted(np.load(tmp_path / "h.npz")["names"].tolist()) == expected
    assert sorted(pq.read_table(tmp_path / "h.parquet")["name"].to_pylist()) == expected
    with (tmp_path / "h.csv").open(newline="", encoding="utf-8") as file:
        _, *rows = csv.reader(file)
    assert sorted(row[0] for row in rows) == expected
    np.testing.assert_array_equal(
        np.array([row[1:] for row in rows], np.float32), np.load(tmp_path / "h.npz")["embeddings"]
    )
    shutil.copy(folder / "a\tb.png", folder / r"\xe9.png")
    assert run("embed", finished, folder, "-o", tmp_path / "h.csv") == 2
    assert r"two files would both be called \xe9.png" in capsys.readouterr().err


def test_images_of_subfolders_are_named_by_their_paths_in_order_and_other_files_are_left_out(
    finished, tmp_path
):
    folder, output = tmp_path / "images", tmp_path / "h.npz"
    for name, shade in (("b/1.png", 255), ("a/1.png", 0), ("c.png", 100)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), shade).save(folder / name)
    (folder / "a/notes.txt").write_text("no image")
    assert run("embed", finished, folder, "-o", output) == 0
    several = np.load(output)
    assert list(several["names"]) == ["a/1.png", "b/1.png", "c.png"]
    for name, h in zip(several["names"], several["embeddings"], strict=True):
        assert run("embed", finished, folder / name, "-o", output) == 0
        one = np.load(output)
        assert list(one["names"]) == [name.rsplit("/")[-1]]
        np.testing.assert_allclose(one["embeddings"][0], h, rtol=1e-4, atol=1e-5)


def test_embedding_refuses_or_skips_what_is_no_image(finished, tmp_path, capsys):
    folder = tmp_path / "images"
    folder.mkdir()
    for name, shade in (("a.png", 0), ("c.png", 255)):
        Image.new("L", (8, 8), shade).save(folder / name)
    (folder / "b.png").write_bytes(b"no image")
    output = tmp_path / "h.npz"
    assert run("embed", finished, folder, "-o", output) == 2
    said = capsys.readouterr().err
    assert f"{folder / 'b.png'} cannot be read" in said
    assert "atoll embed can also leave it out" in said
    assert run("neighbours", finished, folder / "b.png") == 2
    said = capsys.readouterr().err
    assert f"{folder / 'b.png'} cannot be read" in said
    assert "atoll embed" not in said
    with pytest.warns(UserWarning, match=r"b\.png cannot be read .*; it is left out"):
        assert run("embed", finished, folder, "-o", output, "--on-corrupt", "skip") == 0
    assert list(np.load(output)["names"]) == ["a.png", "c.png"]
    (folder / "a.png").unlink()
    capsys.readouterr()
    with pytest.warns(UserWarning, match="left out"):
        assert run("embed", finished, folder, "-o", output, "--on-corrupt", "skip") == 0
    assert capsys.readouterr().out.startswith("1 image, ")
    (folder / "c.png").unlink()
    with pytest.warns(UserWarning, match="left out"):
        assert run("embed", finished, folder, "-o", output, "--on-corrupt", "skip") == 2
    assert f"no image of {folder} can be read" in capsys.readouterr().err


def test_evaluate_under_a_named_protocol(finished, capsys):
    assert run("evaluate", finished, "--protocol", "probe-fedca") == 0
    results = json.loads((finished / "evaluation-probe-fedca.json").read_text())
    assert 0 <= results["probe-fedca/accuracy"] <= 1
    assert run("evaluate", finished, "--protocol", "probee") == 2
