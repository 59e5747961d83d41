"""What is done with a finished run; the run's own evaluation is the oracle of every later one."""

import json
import re
import shutil
import sys

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image

from atoll.cli.main import main
from atoll.commands.embed import embed_images
from atoll.commands.evaluate import evaluate_run, measure_run
from atoll.commands.run_files import find_one_encoder
from atoll.core.errors import UserError
from atoll.core.run_folder import Run
from atoll.data.options import DataOptions
from atoll.models import ModelOptions, build_encoder, load_encoder, save_encoder
from tests.harness import run_tiny

BOTH = "evaluation.at_end=['knn','geometry']"


def protocols_of(results):
    """The numbers of protocols, and nothing else of a run's record."""
    return {key: value for key, value in results.items() if "/" in key}


def assert_alike(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-5, abs=1e-9), key


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """Three clusters among four clients: their sizes differ."""
    folder = tmp_path_factory.mktemp("several") / "run"
    run = run_tiny(folder, "method.name=featarc", "options.featarc.clusters=3", BOTH)
    assert len(set(run.read_json("evaluation.json")["clients_by_model"].values())) > 1
    return run


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return run_tiny(tmp_path_factory.mktemp("one") / "run", BOTH)


@pytest.fixture(scope="module")
def not_held_out(tmp_path_factory):
    return run_tiny(tmp_path_factory.mktemp("whole") / "run", "data.test_fraction=0", BOTH)


def test_every_model_of_a_run_is_measured(several):
    own = several.read_json("evaluation.json")
    found = measure_run(several, ["knn", "geometry"])
    assert found["clients_by_model"] == own["clients_by_model"]
    assert found["by_model"].keys() == own["by_model"].keys()
    assert_alike(protocols_of(found), protocols_of(own))
    for name, numbers in found["by_model"].items():
        assert_alike(numbers, own["by_model"][name])
    clients, accuracies = own["clients_by_model"], own["by_model"]
    expected = sum(clients[name] * accuracies[name]["knn/accuracy"] for name in clients) / 4
    assert found["knn/accuracy"] == pytest.approx(expected)


def test_every_clients_own_model_is_measured(tmp_path):
    run = run_tiny(tmp_path / "run", "method.name=fedbn", "train.participation=0.5", "train.rounds=1")
    own = run.read_json("evaluation.json")
    (run.folder / "encoder-export.safetensors").write_bytes(b"what an export leaves is no model of the run")
    found = measure_run(run, ["knn"])
    assert len(found["by_model"]) == 2
    assert {key: found[key] for key in ("by_model", "clients_by_model", "knn/accuracy")} == {
        key: own[key] for key in ("by_model", "clients_by_model", "knn/accuracy")
    }


def test_the_command_keeps_each_models_numbers_and_shows_their_mean(several, capsys):
    assert main(["evaluate", str(several.folder), "--protocol", "knn"]) == 0
    shown = capsys.readouterr().out
    kept = several.read_json("evaluation-knn.json")
    assert kept["by_model"].keys() == kept["clients_by_model"].keys()
    assert f"{100 * kept['knn/accuracy']:.2f}" in shown
    assert "clients_by_model" in shown
    assert "by_model" not in evaluate_run(several, "knn")


def test_geometry_parts_the_pairs_by_client_as_in_the_run(one):
    own = protocols_of(one.read_json("evaluation.json"))
    found = measure_run(one, ["geometry"])
    assert found["geometry/clients_uniformity_intra"] != found["geometry/clients_uniformity_inter"]
    assert_alike(
        protocols_of(found), {key: value for key, value in own.items() if key.startswith("geometry/")}
    )


def test_other_images_are_no_clients(one):
    there = measure_run(one, ["geometry"], DataOptions(source="digits", limit=80, image_size=8, channels=1))
    assert not any("clients_uniformity" in key for key in there)


def test_a_run_without_its_partition_is_measured_all_the_same(tmp_path, one):
    copy = Run(tmp_path / "copy")
    for name in ("recipe.toml", "encoder.safetensors"):
        copy.folder.mkdir(exist_ok=True)
        (copy.folder / name).write_bytes((one.folder / name).read_bytes())
    found = measure_run(copy, ["knn", "geometry"])
    assert found["knn/accuracy"] == one.read_json("evaluation.json")["knn/accuracy"]
    assert "geometry/clients_uniformity" not in found


@pytest.mark.parametrize("protocol", ["knn", "probe-fedca", "finetune-10"])
def test_accuracies_on_the_training_images_are_refused(not_held_out, protocol, capsys):
    assert main(["evaluate", str(not_held_out.folder), "--protocol", protocol]) == 2
    sentence = capsys.readouterr().err
    assert f"{protocol} cannot be measured, because no images are held out" in sentence
    assert "data.test_fraction" in sentence
    assert sentence.count("\n") == 1
    assert not (not_held_out.folder / f"evaluation-{protocol}.json").exists()


def test_the_geometry_of_the_training_images_is_measured(not_held_out):
    own = not_held_out.read_json("evaluation.json")
    assert own["note"].startswith("knn: not measured, because no images are held out")
    assert not any(key.startswith("knn") for key in own)
    found = evaluate_run(not_held_out, "geometry")
    assert found["split"] == own["split"] == "train"
    assert_alike(protocols_of(found), protocols_of(own))


def test_a_protocol_that_needs_labels_is_refused_without(one):
    unlabelled = DataOptions(source="digits", limit=80, image_size=8, channels=1, labels=False)
    with pytest.raises(
        UserError, match="knn cannot be measured, because the training and test images have no"
    ):
        measure_run(one, ["knn", "geometry"], unlabelled)
    assert measure_run(one, ["geometry"], unlabelled)["split"] == "test"


def test_a_protocol_by_a_wrong_name_is_named_first(not_held_out):
    with pytest.raises(UserError, match="did you mean 'knn'"):
        measure_run(not_held_out, ["kn"])


FLOATS = np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)


def save_floats(path):
    Image.fromarray(FLOATS).save(path)


def save_half(path):
    whole = path.with_suffix(".whole.png")
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64), dtype=np.uint8)).save(whole)
    path.write_bytes(whole.read_bytes()[:2000])
    whole.unlink()


@pytest.mark.parametrize(
    ("name", "spoil", "reason"),
    [
        (
            "scan.tif",
            save_floats,
            "it holds floating-point values, and the recipe does not say which are black",
        ),
        ("half.png", save_half, "it is damaged (image file is truncated"),
        ("text.png", lambda path: path.write_text("hello"), "it is damaged, or in no format that is read"),
        ("empty.png", lambda path: path.write_bytes(b""), "it is empty"),
    ],
)
def test_an_image_that_cannot_be_embedded_gets_a_sentence(one, tmp_path, capsys, name, spoil, reason):
    images = tmp_path / "images"
    images.mkdir()
    Image.fromarray(np.zeros((8, 8), dtype=np.uint8)).save(images / "good.png")
    spoil(images / name)
    assert main(["embed", str(one.folder), str(images), "-o", str(tmp_path / "e.npz")]) == 2
    sentence = capsys.readouterr().err
    assert sentence.startswith(f"atoll: {images / name} cannot be read")
    assert reason in sentence
    assert "convert it to" in sentence
    assert "<_io" not in sentence
    assert "set data." not in sentence, "there is no recipe to set it in"
    assert sentence.count("\n") == 1
    assert not (tmp_path / "e.npz").exists()


def test_floats_are_embedded_where_the_recipe_has_a_window(tmp_path):
    run = run_tiny(tmp_path / "run", "data.window_high=1", "train.rounds=0")
    Image.fromarray(FLOATS).save(tmp_path / "floats.tif")
    Image.fromarray(np.rint(FLOATS * 255).astype(np.uint8)).save(tmp_path / "bytes.png")
    rows = {}
    for name in ("floats.tif", "bytes.png"):
        out = tmp_path / f"{name}.npz"
        assert main(["embed", str(run.folder), str(tmp_path / name), "-o", str(out)]) == 0
        rows[name] = np.load(out)["embeddings"]
    assert np.array_equal(rows["floats.tif"], rows["bytes.png"])


def checkpoint(run, path):
    path.write_bytes(max(run.checkpoints.glob("round-*.safetensors")).read_bytes())


def archive(run, path):
    torch.save(load_encoder(run.encoder_path).state_dict(), path)


def weights(run, path):
    safetensors.torch.save_file(safetensors.torch.load_file(run.encoder_path), path)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (checkpoint, "holds the state of a run, such as a checkpoint, and no encoder"),
        (archive, "is an archive, as torch.save and torch.export write them"),
        (weights, "holds weights without the description of an encoder"),
        (lambda run, path: path.write_text(json.dumps({})), "is damaged or not a safetensors file"),
    ],
)
def test_a_file_that_is_no_encoder_says_what_it_is_and_where_one_lies(one, tmp_path, capsys, make, what):
    file = tmp_path / "file"
    make(one, file)
    Image.fromarray(np.zeros((8, 8), dtype=np.uint8)).save(tmp_path / "a.png")
    assert main(["embed", str(file), str(tmp_path / "a.png"), "-o", str(tmp_path / "e.npz")]) == 2
    sentence = capsys.readouterr().err
    assert sentence.startswith(f"atoll: {file} {what}")
    assert "encoder.safetensors in a finished run's folder" in sentence
    assert "upgrade" not in sentence
    assert sentence.count("\n") == 1


@pytest.mark.parametrize("format", ["pt2", "onnx", "timm"])
def test_an_encoder_whose_images_are_unknown_gets_a_sentence(tmp_path, capsys, format):
    """`save_encoder` takes any metadata."""
    encoder = build_encoder(ModelOptions(encoder="resnet18", stem="standard"), channels=1, image_size=8)
    save_encoder(tmp_path / "encoder.safetensors", encoder, {"mean": [0.5]})
    Image.new("L", (8, 8)).save(tmp_path / "image.png")
    for out, *command in (
        (f"out.{format}", "export", "--format", format),
        ("out.npz", "embed", str(tmp_path / "image.png")),
    ):
        command.insert(1, str(tmp_path / "encoder.safetensors"))
        assert main([*command, "-o", str(tmp_path / out)]) == 2
        assert "does not say the image_size, channels, std of its images" in capsys.readouterr().err
        assert not (tmp_path / out).exists()


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("channels", ["x"], r"says \['x'\] for the channels of its images"),
        ("channels", 10**30, "for the channels of its images"),
        ("image_size", True, "says True for the image_size of its images"),
        ("mean", None, "says None for the mean of its images"),
        ("std", ["\x1b[2J"], "for the std of its images"),
        ("decoding", 5, "decoding in the encoder's file = 5 is not a table"),
        ("decoding", {"image_size": 2**40}, "decoding in the encoder's file.image_size is 1099511627776"),
    ],
)
def test_an_encoder_whose_images_cannot_be_gets_a_sentence(tmp_path, key, value, sentence):
    encoder = build_encoder(ModelOptions(encoder="resnet-narrow"), channels=1, image_size=8)
    about = {"image_size": 8, "channels": 1, "mean": [0.5], "std": [0.5], "decoding": {"image_size": 8}}
    save_encoder(tmp_path / "encoder.safetensors", encoder, {**about, key: value})
    Image.new("L", (8, 8)).save(tmp_path / "image.png")
    with pytest.raises(UserError, match=sentence):
        embed_images(load_encoder(tmp_path / "encoder.safetensors"), tmp_path / "image.png")


def test_the_images_of_a_folder_are_those_that_training_would_read(one, tmp_path):
    for place in ("deep/a.png", ".trash/b.png", "elsewhere/c.png"):
        (tmp_path / "images" / place).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8)).save(tmp_path / "images" / place)
    (tmp_path / "images" / "elsewhere").rename(tmp_path / "elsewhere")
    (tmp_path / "images" / "linked").symlink_to(tmp_path / "elsewhere")
    names, h = embed_images(load_encoder(one.encoder_path), tmp_path / "images")
    assert (names, len(h)) == (["deep/a.png", "linked/c.png"], 2)


def test_images_that_the_clients_did_not_hold_are_not_taken_for_theirs(one, tmp_path):
    copy = Run(shutil.copytree(one.folder, tmp_path / "copy"))
    record = json.loads(copy.partition_path.read_text())
    copy.write("partition.json", json.dumps({**record, "fingerprint": "sites-of-others"}))
    with pytest.raises(
        UserError, match=r"had other images than its recipe's data contain .* --set data\.source"
    ):
        evaluate_run(copy, "knn")
    found = evaluate_run(copy, "knn", ["data.limit=80"])
    assert (found["knn/train_images"], found["data"]["limit"]) == (80, 80)
    evaluate_run(copy, "knn", ["data.limit=70"])
    files = sorted(copy.folder.glob("evaluation-knn*"))
    assert len(files) == 2
    assert all(path.name.startswith("evaluation-knn-on-digits-") for path in files)
    assert found in [copy.read_json(path.name) for path in files]
    with pytest.raises(UserError, match=r"--set evaluation\.knn_k=3 is not possible for a finished run"):
        evaluate_run(copy, "knn", ["evaluation.knn_k=3"])


def test_the_command_measures_on_other_images(one, capsys):
    assert main(["evaluate", str(one.folder), "--protocol", "knn", "--set", "data.limit=80"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"knn/train_images\W+80\b", shown)
    assert re.search(r"data\.limit\W+80\b", shown)  # and not all settings of the images, in one cell
    assert "{" not in shown


def test_no_export_or_embedding_replaces_a_file_of_a_run(one, tmp_path, capsys):
    whole = one.encoder_path.read_bytes()
    folder = str(one.folder)
    for output in ("recipe.toml", "encoder.safetensors"):
        assert main(["export", folder, "--format", "safetensors", "-o", f"{folder}/{output}"]) == 2
        assert "belongs to the run" in capsys.readouterr().err
    assert main(["embed", folder, str(tmp_path), "-o", f"{folder}/checkpoints/h.npz"]) == 2
    assert "belongs to the run" in capsys.readouterr().err
    assert one.encoder_path.read_bytes() == whole
    assert (
        main(["export", folder, "--format", "safetensors", "-o", f"{folder}/encoder-export.safetensors"]) == 0
    )


def test_one_of_several_encoders_is_named(several):
    own = several.read_json("evaluation.json")
    said = f"ended with 3 encoders; this is that of {own['model']}, whose clients hold the most images"
    with pytest.warns(UserWarning, match=said):
        path = find_one_encoder(several.folder)
    largest = several.folder / f"encoder-{own['model']}.safetensors"
    assert path.read_bytes() == largest.read_bytes()
    assert find_one_encoder(largest) == largest  # without a word: it was chosen


def test_exports_of_several_encoders_lie_beside_each_other(several, tmp_path):
    folder = shutil.copytree(several.folder, tmp_path / "run")
    for number in range(3):
        encoder = folder / f"encoder-cluster-{number}.safetensors"
        assert main(["export", str(encoder), "--format", "safetensors"]) == 0
        exported = load_encoder(folder / f"encoder-cluster-{number}-export.safetensors").state_dict()
        expected = load_encoder(encoder).state_dict()
        assert all(torch.equal(exported[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("objective", "supervised"), [("simclr:SimCLR", False), ("supcon:SupCon", True)])
def test_an_export_needs_no_code_of_the_method(tmp_path, monkeypatch, objective, supervised):
    module, _, name = objective.partition(":")
    code = tmp_path / f"lent_{module}.py"
    code.write_text(
        "from atoll.methods.method import Method\n"
        f"from atoll.objectives.{module} import {name}\n\n"
        f"METHOD = Method(objective={name}(), title='Lent')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    run = run_tiny(tmp_path / "run", f"method.name={code.stem}:METHOD", BOTH)
    code.unlink()
    monkeypatch.delitem(sys.modules, code.stem)
    file = tmp_path / "encoder-export.safetensors"
    assert main(["export", str(run.folder), "--format", "safetensors", "-o", str(file)]) == 0
    with safetensors.safe_open(file, "pt") as opened:
        about = json.loads(opened.metadata()["atoll"])["metadata"]
    assert about["provenance"]["supervised"] is supervised


def test_a_file_that_would_not_be_recognised_is_refused(one, tmp_path, capsys):
    out = tmp_path / "encoder.safetensors"
    assert main(["export", str(one.folder), "--format", "onnx", "-o", str(out)]) == 2
    assert "encoder.safetensors must end in .onnx, by which the file is recognised" in capsys.readouterr().err
