import base64
import io
import re

import numpy as np
import pytest
import torch
from PIL import Image

from atoll.core.tree import load, save
from atoll.report.figures import MAX_CLIENTS, SPRITE_COLUMNS, figures
from atoll.report.folders import read_folder
from atoll.report.groups import group_runs
from tests.report.run_folders import evaluation, make_run, thumbnails


def drawn(*folders):
    return figures(group_runs([read_folder(folder) for folder in folders]))


def tiles(sprite):
    """The thumbnails of a sprite, cut out again: (rows × columns, height, width, …)."""
    picture = np.asarray(Image.open(io.BytesIO(base64.b64decode(sprite["uri"].partition(",")[2]))))
    h, w = sprite["height"], sprite["width"]
    return [
        picture[h * (i // SPRITE_COLUMNS) :][:h, w * (i % SPRITE_COLUMNS) :][:, :w]
        for i in range(sprite["rows"] * sprite["columns"])
    ]


@pytest.mark.parametrize("channels", [1, 3])
def test_a_sprite_holds_every_thumbnail_where_the_page_looks_for_it(tmp_path, channels):
    run = make_run(tmp_path / "run")
    picture = load(run / "map.safetensors")
    save(run / "map.safetensors", {**picture, "thumbnails": thumbnails(50, channels)})
    (sprite,) = drawn(run)["sprites"]
    for tile, image in zip(tiles(sprite), thumbnails(50, channels).numpy(), strict=False):
        assert np.array_equal(tile, image.transpose(1, 2, 0).squeeze())


def test_the_same_thumbnails_are_stored_once_and_others_apart(tmp_path):
    runs = [make_run(tmp_path / method, method) for method in ("moon", "ssd", "byol")]
    picture = load(runs[2] / "map.safetensors")
    save(runs[2] / "map.safetensors", {**picture, "thumbnails": 255 - picture["thumbnails"]})
    found = drawn(*runs)
    assert [shown["sprite"] for shown in found["maps"]] == [0, 0, 1]
    assert len(found["sprites"]) == 2


def test_a_map_keeps_its_proportions(tmp_path):
    run = make_run(tmp_path / "run")
    points = load(run / "map.safetensors")["points"].double()
    (shown,) = drawn(run)["maps"]
    placed = torch.tensor([shown["x"], shown["y"]]).double().T
    assert placed.min() >= 0
    assert placed.max() <= 1000
    scale = 1000 / float((points.max(0).values - points.min(0).values).max())
    assert torch.allclose(torch.cdist(placed, placed), scale * torch.cdist(points, points), atol=1.5)


def test_a_collapsed_map_is_a_point(tmp_path):
    run = make_run(tmp_path / "run")
    picture = load(run / "map.safetensors")
    save(run / "map.safetensors", {**picture, "points": torch.zeros(50, 2)})
    (shown,) = drawn(run)["maps"]
    assert set(shown["x"]) == {500}


def test_curves_are_means_over_seeds_with_their_deviation(tmp_path):
    runs = [make_run(tmp_path / f"{seed}", seed=seed, rounds=3) for seed in range(3)]
    (knn,) = [panel for panel in drawn(*runs)["curves"] if panel["title"] == "kNN %"]
    (line,) = knn["series"]
    assert line["x"] == [0, 1, 2, 3]
    assert line["y"] == pytest.approx([50.1, 65.0, 70.0, 75.0])
    assert line["s"] == pytest.approx([np.std([50.0, 50.1, 50.2], ddof=1), 0, 0, 0], abs=1e-4)


def test_the_end_of_a_run_that_measures_only_there_is_on_its_curve(tmp_path):
    run = make_run(tmp_path / "run")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    lines[-1] = re.sub(r', "evaluation".*', "}", lines[-1])
    (run / "metrics.jsonl").write_text("\n".join(lines))
    (knn,) = [panel for panel in drawn(run)["curves"] if panel["title"] == "kNN %"]
    assert (knn["series"][0]["x"], knn["series"][0]["y"]) == ([0, 1, 2, 3], [50.0, 65.0, 70.0, 90.0])


def test_losses_of_different_objectives_share_no_axis(tmp_path):
    a, b = make_run(tmp_path / "a", "moon"), make_run(tmp_path / "b", "ssd")
    c = make_run(
        tmp_path / "c", "fed_simclr", recipe={"method": {"name": "fed_simclr", "objective": "simclr"}}
    )
    losses = [panel for panel in drawn(a, b, c)["curves"] if panel["title"].startswith("Training loss")]
    assert [[line["line"] for line in panel["series"]] for panel in losses] == [[0, 1], [2]]
    assert losses[0]["series"][0]["y"] == [2.0, 1.0, 0.66667]


def test_spectra_are_shares_of_the_largest_singular_value(tmp_path):
    run = make_run(tmp_path / "run", results={**evaluation(0.9), "geometry/singular_values": [4.0, 1.0, 0.0]})
    trained, untrained = drawn(run)["spectrum"]["series"]
    assert (trained["line"], trained["y"]) == (0, [1.0, 0.25])
    assert (untrained["line"], untrained["y"]) == (-1, [1.0, 0.5, 0.25, 0.125])


def test_the_spectrum_of_a_run_is_the_mean_of_its_models(tmp_path):
    """A band would be the deviation over seeds, of which there is one."""
    models = {"a": [4.0, 1.0], "b": [2.0, 1.0, 0.5]}
    results = {
        **evaluation(0.9),
        "by_model": {name: {"geometry/singular_values": values} for name, values in models.items()},
        "clients_by_model": {"a": 3, "b": 1},
    }
    trained, _ = drawn(make_run(tmp_path / "run", results=results))["spectrum"]["series"]
    assert trained["y"] == [1.0, (3 * 0.25 + 0.5) / 4]
    assert trained["s"] is None


def test_a_round_that_one_seed_reached_has_no_deviation(tmp_path):
    runs = [make_run(tmp_path / f"s{seed}", seed=seed, rounds=rounds) for seed, rounds in ((0, 3), (1, 2))]
    loss = drawn(*runs)["curves"][0]["series"][0]
    assert (loss["x"], loss["s"]) == ([1, 2, 3], [0.0, 0.0, None])


def test_a_partition_that_runs_share_is_drawn_once(tmp_path):
    runs = [make_run(tmp_path / f"{m}{s}", m, s) for m, s in (("moon", 0), ("ssd", 0), ("ssd", 1))]
    assert [partition["label"] for partition in drawn(*runs)["partitions"]] == [
        "moon and 1 more, seed 0",
        "ssd, seed 1",
    ]


def test_partitions_of_one_seed_are_told_apart(tmp_path):
    runs = [
        make_run(
            tmp_path / f"{method}{clients}",
            method,
            clients=clients,
            recipe={"partition": {"clients": clients}},
        )
        for clients in (3, 5)
        for method in ("moon", "ssd")
    ]
    assert [partition["label"] for partition in drawn(*runs)["partitions"]] == [
        "moon · partition.clients = 3 and 1 more, seed 0",
        "moon · partition.clients = 5 and 1 more, seed 0",
    ]


def test_of_very_many_clients_some_are_drawn_from_the_largest_to_the_smallest(tmp_path):
    (partition,) = drawn(make_run(tmp_path / "run", clients=500))["partitions"]
    sizes = [client["size"] for client in partition["clients"]]
    assert partition["of"] == 500
    assert len(sizes) == MAX_CLIENTS
    assert sizes == sorted(sizes, reverse=True)


def test_traffic_is_in_megabytes_per_round(tmp_path):
    up, down = drawn(make_run(tmp_path / "run", rounds=1, asked=1))["traffic"]
    for panel, title, value in ((up, "Upload, MB per round", 1.5), (down, "Download, MB per round", 2.5)):
        assert (panel["title"], panel["digits"], panel["zero"]) == (title, 2, True)
        assert panel["series"] == [{"line": 0, "x": [1], "y": [value], "s": None}]
