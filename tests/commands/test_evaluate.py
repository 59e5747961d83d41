import json
from dataclasses import replace

import pytest
import torch
from PIL import Image

from atoll.commands.evaluate import evaluate_on, evaluate_run, measure_run
from atoll.commands.export import provenance
from atoll.core.errors import UserError
from atoll.core.run_folder import Run
from atoll.data.options import PartitionOptions
from atoll.evaluation import embed, evaluate, knn_accuracy
from atoll.models import load_encoder
from atoll.recipe.recipe import recipe_of
from tests.harness import run_tiny
from tests.steps import federation
from tests.trees import same

SETTINGS = (
    "method.name=featarc_cluster",
    "partition.kind=shards",
    "partition.clients=5",
    "partition.classes_per_client=2",
    "evaluation.knn_k=5",
    'evaluation.at_end=["knn", "clients-knn"]',
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return run_tiny(tmp_path_factory.mktemp("clusters") / "run", *SETTINGS)


def test_clients_are_tested_on_their_classes_with_their_clusters_models(run):
    found, splits = run.read_json("evaluation.json"), federation(*SETTINGS).splits
    plain = federation(*SETTINGS).views.plain
    train, test = splits.train, splits.test
    users = found["users_by_model"]
    assert {name: len(clients) for name, clients in users.items()} == found["clients_by_model"]
    assert found["clients-knn/clients"] == list(range(5))
    for name, clients in users.items():
        encoder = load_encoder(run.folder / f"encoder-{name}.safetensors")
        with torch.no_grad():
            train_h, test_h = (
                encoder(plain(images.images.gather(torch.arange(len(images))))) for images in (train, test)
            )
        for client in clients:
            own = torch.isin(test.labels, torch.tensor([2 * client, 2 * client + 1]))
            expected = knn_accuracy(train_h, train.labels, test_h[own], test.labels[own], 5)
            assert found["clients-knn/images"][client] == int(own.sum())
            assert found["clients-knn/accuracies"][client] == pytest.approx(expected)
    assert len(set(found["clients-knn/accuracies"])) > 1


def test_a_finished_run_is_measured_alike(run):
    found = run.read_json("evaluation.json")
    again = measure_run(run, ["clients-knn"])
    assert again["clients-knn/accuracies"] == found["clients-knn/accuracies"]
    assert again["clients-knn/worst_accuracy"] == min(found["clients-knn/accuracies"])


def test_a_run_of_a_gpu_is_evaluated_without_one(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    recipe = recipe_of(run)
    there = replace(recipe, engine=replace(recipe.engine, devices=("cuda:0", "cuda:1")))
    for only in (there, replace(recipe, engine=recipe.engine.on("cuda"))):
        with pytest.raises(UserError, match=r"engine\.device.*no GPU; name cpu instead: --device cpu$"):
            evaluate_on(run, "knn", recipe=only)
        found = evaluate_on(run, "knn", recipe=only, device="cpu")
        assert found["knn/accuracy"] == measure_run(run, ["knn"])["knn/accuracy"]
    for device, reason in (
        ("cuda", "--device names cuda, and PyTorch finds no GPU"),
        ("tpu", "--device is 'tpu'"),
    ):
        with pytest.raises(UserError, match=reason):
            evaluate_run(run, "knn", device=device)


def test_a_result_that_cannot_be_kept_is_shown(run, monkeypatch):
    def refuse(self, name, text):
        raise UserError(f"cannot write {name}: Permission denied")

    monkeypatch.setattr(Run, "write", refuse)
    with pytest.warns(
        UserWarning, match=r"shown and not kept: cannot write evaluation-knn\.json: Permission"
    ):
        found = evaluate_run(run, "knn")
    assert found["knn/accuracy"] == measure_run(run, ["knn"])["knn/accuracy"]
    monkeypatch.undo()
    evaluate_run(run, "knn")
    assert run.read_json("evaluation-knn.json")["knn/accuracy"] == found["knn/accuracy"]


def test_a_run_that_does_not_say_who_uses_which_model_cannot_test_clients(run):
    text = run.read("evaluation.json")
    old = json.loads(text)
    del old["users_by_model"]
    run.write("evaluation.json", json.dumps(old))
    try:
        with pytest.raises(UserError, match="clients-knn cannot be measured"):
            measure_run(run, ["clients-knn"])
        assert measure_run(run, ["knn"])["knn/accuracy"] == old["knn/accuracy"]
    finally:
        run.write("evaluation.json", text)


def test_a_supervised_classifier_is_tested_on_each_clients_classes(tmp_path):
    run = run_tiny(tmp_path / "run", *SETTINGS, "method.name=dec_slrep", "train.rounds=1")
    found = run.read_json("evaluation.json")
    images, accuracies = found["clients-classifier/images"], found["clients-classifier/accuracies"]
    whole = sum(n * a for n, a in zip(images, accuracies, strict=True)) / sum(images)
    assert (
        whole
        == pytest.approx(found["classifier/accuracy"])
        == pytest.approx(found["clients-classifier/weighted_accuracy"])
    )


@pytest.mark.filterwarnings("ignore:model.* does not apply")
def test_what_is_measured_at_the_end_is_plain_like_the_finished_file(tmp_path, monkeypatch):
    pytest.importorskip("timm", reason="the extra atoll[timm] is not installed")
    pytest.importorskip("peft", reason="the extra atoll[peft] is not installed")
    measured = []

    def spy(encoder, *rest, **options):
        measured.append({name: weight.clone() for name, weight in encoder.state_dict().items()})
        return evaluate(encoder, *rest, **options)

    monkeypatch.setattr("atoll.commands.evaluator.evaluate", spy)
    model = ("model.encoder=timm:test_vit", "model.lora_rank=2", "data.image_size=32")
    run = run_tiny(tmp_path, *model, "train.rounds=1")
    saved = load_encoder(run.encoder_path).state_dict()
    assert len(measured) == 2  # before the first round, and at the end
    assert same(measured[-1], saved)  # no adapters, which fine-tuning would train beside the weights


def test_settings_that_leave_the_images_leave_the_clients_shifts(tmp_path):
    shift = ('shift.kinds=["rotation"]', "shift.evaluation=clients", "evaluation.knn_k=5")
    run = run_tiny(tmp_path / "run", *shift)
    images = recipe_of(run).data
    there = measure_run(run, ["knn"])
    same_ones = measure_run(run, ["knn"], replace(images, memory_gib=7.0))
    del same_ones["fingerprints"]
    assert same_ones == there
    # The shifts are the clients', so that other images have none.
    other = measure_run(run, ["knn"], replace(images, limit=500))
    assert other["knn/accuracy"] > there["knn/accuracy"]


def test_a_record_of_other_images_says_which_they_were(tmp_path):
    """Another seed may be measured after the folder has changed; its record then has another name for them."""
    run = run_tiny(tmp_path / "run", "train.rounds=1")
    folder = tmp_path / "images"
    for name in ("train/a", "train/b", "test/a", "test/b"):
        (folder / name).mkdir(parents=True)
        for i in range(5):
            Image.effect_noise((8, 8), 20 * i + len(name)).save(folder / name / f"{i}.png")
    settings = ["data.source=folder", f"data.path={folder}"]
    marks = []
    for _ in range(2):
        found = evaluate_run(run, "knn", settings)
        (file,) = run.folder.glob("evaluation-knn-on-images-*.json")
        marks.append(json.loads(file.read_text())["fingerprints"])
        assert found["fingerprints"] == marks[-1]
        next(folder.glob("test/*/*.png")).unlink()
    assert marks[0][0] == marks[1][0]
    assert marks[0][1] != marks[1][1]
    evaluate_run(run, "knn")
    assert "fingerprints" not in run.read_json("evaluation-knn.json")


def test_images_of_other_channels_are_refused(run):
    images = replace(recipe_of(run).data, source="synthetic", channels=3)
    with pytest.raises(UserError, match=r"the encoder takes 1 channel; set data.channels=1"):
        measure_run(run, ["geometry"], images)


def test_an_exported_model_has_its_own_numbers(run):
    results = run.read_json("evaluation.json")
    assert len(results["by_model"]) > 1
    for name, own in results["by_model"].items():
        assert provenance(run, name)["results"]["knn/accuracy"] == own["knn/accuracy"]
    assert provenance(run)["results"]["knn/accuracy"] == results["by_model"][results["model"]]["knn/accuracy"]


def test_a_client_is_tested_on_images_with_its_own_shift(tmp_path):
    settings = (
        "method.name=fedbn", "shift.kinds=['rotation']", "shift.evaluation=clients", "evaluation.knn_k=5",
        "evaluation.at_end=['clients-knn']",
    )  # fmt: skip
    run = run_tiny(tmp_path / "run", *settings)
    made = federation(*settings)
    train, test = made.splits.train, made.splits.test
    found = run.read_json("evaluation.json")["clients-knn/accuracies"]
    for client in range(4):
        own = test.subset((test.images.owners == client).nonzero().squeeze(1))
        encoder = load_encoder(run.folder / f"encoder-client-{client}.safetensors")
        h = [embed(encoder, made.views.plain, images.images) for images in (train, own)]
        assert found[client] == pytest.approx(knn_accuracy(h[0], train.labels, h[1], own.labels, k=5))


def test_the_only_client_with_a_model_is_the_only_one_that_is_tested(tmp_path):
    run = run_tiny(
        tmp_path / "run", "method.name=fedbn", "train.rounds=1", "train.participation=0.25",
        "partition.kind=shards", "evaluation.knn_k=5", 'evaluation.at_end=["clients-knn"]', "partition.clients=5",
    )  # fmt: skip
    own = run.read_json("evaluation.json")
    assert len(next(iter(own["users_by_model"].values()))) == 1
    found = measure_run(run, ["clients-knn"])
    assert found["clients-knn/accuracies"] == own["clients-knn/accuracies"]


def test_a_column_called_client_determines_the_clients_wherever_it_stands():
    natural = PartitionOptions(kind="natural")
    assert natural.client_column(["age", "client"]) == "client"
    assert natural.client_column(["site"]) == "site"
    assert natural.client_column(["site"], unread=["hospital"]) is None
    assert natural.client_column(["age", "site"]) is None
    assert replace(natural, column="age").client_column(["age", "client"]) == "age"
    assert PartitionOptions(kind="iid").client_column(["client"]) is None


def test_a_protocol_of_the_users_code_is_found_in_the_working_folder(run, tmp_path, monkeypatch):
    (tmp_path / "widths.py").write_text("def width(found):\n    return {'h': float(found.test_h.shape[1])}\n")
    with pytest.raises(UserError, match="protocol 'widths:width': no module 'widths' in this folder"):
        evaluate_run(run, "widths:width")
    monkeypatch.chdir(tmp_path)
    found = evaluate_run(run, "widths:width")
    first = min(run.folder.glob("encoder-*.safetensors"))
    assert found["widths:width/h"] == load_encoder(first).dim
    assert json.loads((run.folder / "evaluation-widths.width.json").read_text())["protocol"] == "widths:width"
