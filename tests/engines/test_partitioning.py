"""Feature clusters and shifts in whole federations: the same in every engine, and what is evaluated."""

import json
import shutil
import warnings

import pytest
import torch
from PIL import Image

from atoll.commands.evaluate import measure_run
from atoll.commands.run import run_recipe
from atoll.core.errors import UserError
from atoll.data.partition.feature_clusters import feature_clusters
from atoll.data.sources import load_data
from atoll.engines import partitioning
from atoll.engines.federation import Federation
from atoll.engines.partitioning import cluster_images, partition_clients
from atoll.evaluation import embed
from atoll.recipe import engine_options
from tests.harness import final_models, run_tiny, tiny
from tests.trees import same

SHIFT = ("shift.kinds=['rotation','style','corruption']", "shift.corruptions=['gaussian-noise','shot-noise']")
CLUSTERS = ("partition.kind=dirichlet", "partition.alpha=1", "partition.features=untrained")
UNLIKE = (*CLUSTERS, *SHIFT, "method.name=fed_simclr")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("ATOLL_CACHE", str(folder))
    return folder


def all_of(images):
    return images.images.gather(torch.arange(len(images)))


def test_clusters_are_of_the_initial_encoders_features(cache):
    recipe = tiny(*CLUSTERS, "partition.feature_clusters=6", "partition.feature_dims=5")
    federation = Federation(recipe)
    images = federation.splits.train
    features = embed(federation.encoder, federation.views.plain, images.images)
    ids = cluster_images(images, recipe)
    assert torch.equal(ids, feature_clusters(features, 6, 5, recipe.seed))
    assert federation.partition.cluster_counts.shape == (4, 6)
    assert torch.equal(federation.partition.cluster_counts.sum(0), torch.bincount(ids))
    (kept,) = (cache / "clusters").iterdir()
    whole = kept.read_bytes()
    for damaged in (whole[:-1] + bytes([whole[-1] ^ 1]), whole[:-1], b""):
        kept.write_bytes(damaged)
        assert torch.equal(cluster_images(images, recipe), ids)
        assert kept.read_bytes() == whole
    kept.unlink()
    assert torch.equal(cluster_images(images, recipe), ids)  # read or made, they are the same
    assert not torch.equal(cluster_images(images, tiny(*CLUSTERS, "seed=1")), ids)


def test_features_are_made_by_the_kernels_of_the_run(monkeypatch):
    """Another process, which may have no cache, must find the same clusters on a GPU."""
    done = []
    monkeypatch.setattr(engine_options, "repeat_results", lambda device, wanted: done.append(wanted))

    def embedded(encoder, *arguments):
        done.append(len(arguments[1]))
        return embed(encoder, *arguments)

    monkeypatch.setattr(partitioning, "embed", embedded)
    recipe = tiny(*CLUSTERS, "engine.deterministic=false")
    images = load_data(recipe.data, recipe.seed).train
    cluster_images(images, recipe)
    assert done == [1, False, len(images)]  # one image first, on the CPU


def test_an_encoder_of_a_run_or_a_file_makes_the_features(tmp_path):
    run = run_tiny(tmp_path / "run")
    by_run, by_file = (
        Federation(tiny(*CLUSTERS, f"partition.features={path}")).partition
        for path in (run.folder, run.encoder_path)
    )
    assert all(map(torch.equal, by_run.clients, by_file.clients))
    untrained = Federation(tiny(*CLUSTERS)).partition
    assert by_run.cluster_counts.tolist() != untrained.cluster_counts.tolist()
    with pytest.raises(UserError, match=r"partition\.features = 'nowhere': there is no file"):
        Federation(tiny(*CLUSTERS, "partition.features=nowhere"))
    with pytest.raises(UserError, match="images with 1 channel"):
        Federation(tiny(*CLUSTERS, f"partition.features={run.folder}", "data.channels=3"))


def test_a_run_is_not_resumed_with_other_clusters(tmp_path):
    encoders = [run_tiny(tmp_path / str(seed), f"seed={seed}").encoder_path for seed in (1, 2)]
    chosen = shutil.copy(encoders[0], tmp_path / "chosen.safetensors")
    settings = (*CLUSTERS, f"partition.features={chosen}")
    run_tiny(tmp_path / "run", *settings)
    shutil.copy(encoders[1], chosen)
    with pytest.raises(UserError, match="another partition of the same images"):
        run_tiny(tmp_path / "run", *settings, "train.rounds=3", resume=True)
    shutil.copy(encoders[0], chosen)
    assert run_tiny(tmp_path / "run", *settings, "train.rounds=3", resume=True).finished


def test_workers_and_a_resumed_run_see_the_same_images(tmp_path):
    whole = run_tiny(tmp_path / "whole", *UNLIKE, "train.rounds=2")
    run_tiny(tmp_path / "cut", *UNLIKE, "train.rounds=1")
    resumed = run_tiny(tmp_path / "cut", *UNLIKE, "train.rounds=2", "engine.workers=2", resume=True)
    assert same(final_models(whole), final_models(resumed))
    shifts = [client["shift"] for client in json.loads(whole.partition_path.read_text())["clients"]]
    assert shifts == [
        "rotated by 0°, painting, gaussian-noise 3",
        "rotated by 90°, sketch, shot-noise 3",
        "rotated by 180°, mosaic, gaussian-noise 3",
        "rotated by 270°, poster, shot-noise 3",
    ]
    plain = run_tiny(tmp_path / "plain", *CLUSTERS, "method.name=fed_simclr")
    assert not same(final_models(whole), final_models(plain))


def test_a_client_trains_on_its_shifted_images():
    federation = Federation(tiny(*SHIFT))
    for client, indices in enumerate(federation.partition.clients):
        data = federation.client_data(client)
        batch = data.pick(torch.arange(5))
        assert torch.equal(batch, federation.views.plain(federation.images.images.gather(indices[:5])))
        assert not torch.equal(
            batch, federation.views.plain(federation.splits.train.images.gather(indices[:5]))
        )


def test_the_evaluation_is_of_the_sources_images_or_of_the_clients():
    splits = load_data(tiny().data, 0)
    federation = Federation(tiny(*SHIFT))
    assert torch.equal(all_of(federation.splits.train), all_of(splits.train))
    assert torch.equal(all_of(federation.splits.test), all_of(splits.test))
    federation = Federation(tiny(*SHIFT, "shift.evaluation=clients"))
    assert torch.equal(all_of(federation.splits.train), all_of(federation.images))
    assert not torch.equal(all_of(federation.splits.train), all_of(splits.train))
    owners = federation.splits.test.images.owners
    assert torch.bincount(owners, minlength=4).tolist() == [90, 90, 90, 89]
    assert torch.equal(federation.splits.test.labels, splits.test.labels)
    assert (federation.client_ids() >= 0).all()


def test_a_centralised_run_has_no_shift():
    federation = Federation(tiny(*UNLIKE, "partition.kind=centralised", "shift.evaluation=clients"))
    assert federation.images is federation.splits.train
    assert federation.partition.shifts == ()


def test_a_finished_run_is_measured_on_the_images_of_its_evaluation(tmp_path):
    run = run_tiny(tmp_path / "run", *SHIFT, "shift.evaluation=clients")
    found = measure_run(run, ["knn"])
    assert found["knn/accuracy"] == run.read_json("evaluation.json")["knn/accuracy"]


def test_flowers_shares_and_real_sites_shift_their_own_images(tmp_path, monkeypatch):
    pytest.importorskip("flwr", reason="the extra atoll[flower] is not installed")
    from atoll.engines.flower.app_options import FlowerOptions
    from atoll.engines.flower.engine import FlowerEngine
    from tests.engines.flower.deployment import SITES, one_folder, write_digits
    from tests.engines.flower.grid import FakeGrid, node, shares

    monkeypatch.setenv("ATOLL_STATE", str(tmp_path / "state"))

    def play(grid, name, recipe, **options):
        engine = FlowerEngine(grid, FlowerOptions(wait=5.0, deadline=30.0, **options), recipe.to_toml())
        return run_recipe(recipe, tmp_path / name, False, None, engine)

    ours = run_tiny(tmp_path / "ours", *UNLIKE)
    theirs = play(shares(4), "theirs", tiny(*UNLIKE))
    assert same(final_models(ours), final_models(theirs))

    folders = ("data.source=clients", "data.channels=1", "partition.kind=natural")
    write_digits(tmp_path / "images")
    together = one_folder(tmp_path / "together", tmp_path / "images")
    ours = run_tiny(tmp_path / "pooled", f"data.path={together}", "data.limit=1000000", *folders, *SHIFT)
    nodes = {
        10 + k: node(10 + k, {"site": name, "data": str(tmp_path / "images" / name), "source": "folder"})
        for k, name in enumerate(SITES)
    }
    theirs = play(FakeGrid(nodes), "sites", tiny("data.path=nowhere", *folders, *SHIFT), sites=4)
    assert same(final_models(ours), final_models(theirs))
    plain = run_tiny(tmp_path / "plain", f"data.path={together}", "data.limit=1000000", *folders)
    assert not same(final_models(ours), final_models(plain))


def test_another_architecture_with_the_same_weights_has_clusters_of_its_own(cache):
    alone = {}
    for stem in ("cifar", "strided"):
        alone[stem] = Federation(tiny(*CLUSTERS, f"model.stem={stem}")).partition.cluster_counts.tolist()
        shutil.rmtree(cache / "clusters")
    assert alone["cifar"] != alone["strided"]
    for stem, expected in alone.items():  # the second finds the first's in the cache
        found = Federation(tiny(*CLUSTERS, f"model.stem={stem}")).partition.cluster_counts.tolist()
        assert found == expected


def test_folders_of_clients_whose_images_others_get_are_told(tmp_path):
    for shade, client in enumerate(("north", "south") * 4):
        (tmp_path / client).mkdir(exist_ok=True)
        Image.new("L", (8, 8), 10 * shade).save(tmp_path / client / f"{shade}.png")
    folders = ("data.source=clients", f"data.path={tmp_path}", "data.test_fraction=0", "partition.clients=3")
    images = load_data(tiny(*folders).data, 0).train
    told = (
        r"because partition\.kind = 'iid'; to keep the folders as clients, set partition\.kind = 'natural'$"
    )
    with pytest.warns(UserWarning, match=told):
        mixed = partition_clients(images, tiny(*folders, "partition.kind=iid"))
    assert len(mixed) == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept = partition_clients(images, tiny(*folders, "partition.kind=natural"))
    assert kept.names == ["north", "south"]
