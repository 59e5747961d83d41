import json

import pytest

from atoll.report.folders import read_folder
from atoll.report.groups import group_runs, untrained_rows
from atoll.report.same_images import other_images
from tests.report.run_folders import evaluation, make_run


def grouped(*folders):
    return group_runs([read_folder(folder) for folder in folders])


def test_seed_and_workers_make_no_other_experiment(tmp_path):
    groups = grouped(
        make_run(tmp_path / "a", seed=1),
        make_run(tmp_path / "b", seed=0, recipe={"engine": {"workers": 2}}),
        make_run(tmp_path / "c", "moon"),
    )
    assert [(group.label, group.seeds) for group in groups] == [("ssd", [0, 1]), ("moon", [0])]


def test_an_unfinished_seed_stays_with_the_others(tmp_path):
    """It has not recorded which images it is evaluated on."""
    runs = [make_run(tmp_path / str(seed), seed=seed, results={} if seed == 0 else None) for seed in range(3)]
    for run in runs:
        (run / "held_out.json").write_text(json.dumps({"fingerprint": "a"}))
    (runs[0] / "evaluation.json").unlink(missing_ok=True)
    (group,) = grouped(*runs)
    assert (group.seeds, group.evaluated) == ([0, 1, 2], (1, 2))


def test_namesakes_are_told_apart_by_what_differs(tmp_path):
    options = [{"options": {"dsr": {"alpha": alpha}}} for alpha in (0.5, 2.0)]
    groups = grouped(*(make_run(tmp_path / f"{i}", recipe=recipe) for i, recipe in enumerate(options)))
    assert [group.label for group in groups] == ["ssd · dsr.alpha = 0.5", "ssd · dsr.alpha = 2"]


def test_a_method_is_called_as_its_paper_does_where_the_run_says_how(tmp_path):
    assert grouped(make_run(tmp_path / "a", results={**evaluation(0.5), "method": "SSD"}))[0].label == "SSD"


def test_methods_that_begin_with_one_encoder_share_its_row(tmp_path):
    a, b = make_run(tmp_path / "a", "moon"), make_run(tmp_path / "b", "ssd")
    (row,) = untrained_rows(grouped(a, b))
    assert (row.label, len(row.results)) == ("Untrained encoder", 1)
    metrics = (b / "metrics.jsonl").read_text()
    (b / "metrics.jsonl").write_text(metrics.replace('"knn/accuracy": 0.5', '"knn/accuracy": 0.25', 1))
    rows = untrained_rows(grouped(a, b))
    assert [row.label for row in rows] == ["Untrained encoder of moon", "Untrained encoder of ssd"]
    assert [row.results[0]["knn/accuracy"] for row in rows] == [0.5, 0.25]


def test_an_encoder_of_another_kind_has_a_row_of_its_own(tmp_path):
    a = make_run(tmp_path / "a", "moon")
    b = make_run(tmp_path / "b", "ssd", seed=1)
    c = make_run(tmp_path / "c", "byol", seed=2, recipe={"model": {"encoder": "vit-tiny"}})
    rows = untrained_rows(grouped(a, b, c))
    assert [row.label for row in rows] == [
        "Untrained encoder · model.encoder = resnet-narrow",
        "Untrained encoder · model.encoder = vit-tiny",
    ]
    assert [[found["knn/accuracy"] for found in row.results] for row in rows] == [[0.5, 0.501], [0.502]]


def test_an_encoder_of_ones_own_is_not_told_apart_by_options_that_it_ignores(tmp_path):
    """A complete recipe holds their defaults."""
    own = {"model": {"encoder": "mine:Net", "stem": "cifar", "width": 64}}
    narrow = {"model": {"encoder": "resnet-narrow", "stem": "strided", "width": 4}}
    groups = grouped(make_run(tmp_path / "a", recipe=own), make_run(tmp_path / "b", recipe=narrow))
    labels = [
        "model.encoder = mine:Net",
        "model.encoder = resnet-narrow, model.stem = strided, model.width = 4",
    ]
    assert [row.label for row in untrained_rows(groups)] == [
        f"Untrained encoder · {label}" for label in labels
    ]
    assert [group.label for group in groups] == [f"ssd · {label}" for label in labels]


def test_an_encoder_of_pretrained_weights_is_not_called_untrained(tmp_path):
    """Its first numbers are those of the weights that it was given."""
    recipes = [
        {"model": {"encoder": "resnet18", "weights": "/home/me/backbone.pth"}},
        {"model": {"encoder": "resnet18", "init": "torchvision"}},
        {"model": {"encoder": "resnet18", "init": "random"}},
        {"model": {"encoder": "object:Net#1a2b3c4d"}},
    ]
    runs = [make_run(tmp_path / f"{i}", seed=i, recipe=recipe) for i, recipe in enumerate(recipes)]
    assert [row.label for row in untrained_rows(grouped(runs[0]))] == ["Start encoder"]
    assert [row.label for row in untrained_rows(grouped(*runs))] == [
        "Start encoder (…/backbone.pth)",
        "Start encoder (torchvision:resnet18)",
        "Untrained encoder",
        "Start encoder (Net)",
    ]


def test_the_same_test_images_in_another_folder_make_no_other_experiment(tmp_path):
    for seed, (name, images) in enumerate([("a", "47"), ("b", "47"), ("c", "48")]):
        path = {"data": {"source": "folder", "path": f"/{name}/pictures"}}
        run = make_run(tmp_path / name, seed=seed, recipe=path, results=evaluation(0.5))
        (run / "held_out.json").write_text(json.dumps({"fingerprint": images}))
    groups = grouped(*(tmp_path / name for name in "abc"))
    assert [group.seeds for group in groups] == [[0, 1], [2]]
    assert "data.path" not in other_images(groups[:1] * 2)


def with_images(run, test, training):
    (run / "held_out.json").write_text(json.dumps({"fingerprint": test}))
    partition = json.loads((run / "partition.json").read_text())
    (run / "partition.json").write_text(json.dumps({**partition, "fingerprint": training}))
    return run


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (("47", "60"), ("48", "61"), "not evaluated on the same images"),
        (("47", "60"), ("47", "61"), "not trained on the same images"),
    ],
)
def test_seeds_on_other_images_in_the_same_folder_are_no_mean(tmp_path, first, second, words):
    """The folder's images changed after the first seed; the recipes still differ in the seed alone."""
    groups = grouped(
        *(
            with_images(make_run(tmp_path / f"{seed}", seed=seed, results=evaluation(0.5)), *images)
            for seed, images in enumerate((first, second, first))
        )
    )
    assert [group.seeds for group in groups] == [[0, 2], [1]]
    assert [len(row.results) for row in untrained_rows(groups)] == [2, 1]
    assert words in other_images(groups)
    assert not other_images(groups[:1])


def test_seeds_with_validation_images_of_their_own_are_a_mean(tmp_path):
    results = {**evaluation(0.5), "split": "validation"}
    runs = [
        with_images(make_run(tmp_path / f"{seed}", seed=seed, results=results), f"{seed}", f"{seed}")
        for seed in (0, 1)
    ]
    groups = grouped(*runs)
    assert [group.seeds for group in groups] == [[0, 1]]
    assert len(untrained_rows(groups)) == 1
    assert not other_images(groups)
