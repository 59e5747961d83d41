"""Kept models and measures against slow readings of the same run."""

import math
from itertools import combinations

import numpy as np
import pytest
import torch

from atoll.core.errors import UserError
from atoll.core.kept_models import kept_models, kept_rounds
from atoll.core.run_folder import Run
from atoll.core.tree import load
from atoll.engines.federation import Federation
from atoll.engines.observer import Observer
from atoll.evaluation import embed
from atoll.evaluation.metrics import MEASURES
from atoll.report.figures import figures
from atoll.report.folders import read_folder
from atoll.report.groups import group_runs
from tests.harness import final_models, run_tiny, tiny
from tests.trees import same

ALL = ("evaluation.measures=['norms','layers','distances','angles']",)
SETTINGS = (
    "method.name=ssd",
    "train.rounds=3",
    "train.keep_local_models=[2, -1]",
    "train.keep_models_every=1",
    "evaluation.measures_every=2",
    "evaluation.measured_clients=3",
    *ALL,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return run_tiny(tmp_path_factory.mktemp("observed") / "run", *SETTINGS)


def kept(run, round):
    return {name: load(path) for name, path in kept_models(run.folder, round).items()}


def test_the_chosen_rounds_models_are_kept_as_they_were(run):
    assert kept_rounds(run.folder) == [0, 1, 2, 3]
    names = ["client-0", "client-1", "client-2", "client-3", "global"]
    assert [list(kept_models(run.folder, round)) for round in range(4)] == [
        ["global"],
        ["global"],
        names,
        names,
    ]
    assert same(kept(run, 3)["global"], final_models(run)["global"])
    assert same(kept(run, 0)["global"], Federation(tiny(*SETTINGS)).initial_weights())
    # Equal sizes: FedAvg's model is the plain mean of the kept local ones.
    last = kept(run, 3)
    for name, tensor in last["global"].items():
        if tensor.is_floating_point():
            mean = sum(last[f"client-{k}"][name].double() for k in range(4)) / 4
            torch.testing.assert_close(tensor.double(), mean, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("method", ["aggregation=private_fedavg", "aggregation=fedavg"])
def test_a_model_is_kept_after_its_rounds_checkpoint_and_on_resuming(tmp_path, monkeypatch, method):
    """A private round that is repeated has other noise: its first model must not lie about."""
    settings = (f"method.{method}", "train.bn_buffers=leave", "train.rounds=2", "train.keep_models_every=1")
    checkpoint, keep = Run.checkpoint, Observer.keep

    def killed(place, name, original):
        def stop(self, round, *more):
            if round == 2:
                raise KeyboardInterrupt
            original(self, round, *more)

        monkeypatch.setattr(place, name, stop)
        with pytest.raises(KeyboardInterrupt):
            run_tiny(tmp_path, *settings, resume=(tmp_path / "recipe.toml").exists())
        monkeypatch.setattr(place, name, original)

    killed(Run, "checkpoint", checkpoint)
    assert kept_rounds(tmp_path) == [0, 1]
    killed(Observer, "keep", keep)
    assert kept_rounds(tmp_path) == [0, 1]
    run = run_tiny(tmp_path, *settings, resume=True)
    assert kept_rounds(tmp_path) == [0, 1, 2]
    assert same(kept(run, 2)["global"], final_models(run)["global"])


def test_observing_changes_no_bit_of_the_training(run, tmp_path):
    plain = run_tiny(tmp_path / "plain", "method.name=ssd", "train.rounds=3")
    assert plain.encoder_path.read_bytes() == run.encoder_path.read_bytes()
    assert not (plain.folder / "models").exists()
    assert not any("measures" in line or "layers" in line for line in plain.metrics)


def features(federation, weights, z=False):
    encoder = federation.load(weights).eval()
    projector = federation.networks["projector"].eval()
    with torch.no_grad():
        h = encoder(
            federation.views.plain(
                federation.splits.test.images.gather(torch.arange(len(federation.splits.test)))
            )
        )
        return (projector(h) if z else h).double().numpy()


def test_measures_are_those_of_the_kept_models(run):
    lines = {line["round"]: line for line in run.metrics}
    assert [round for round, line in lines.items() if "measures" in line] == [2, 3]
    federation = Federation(tiny(*SETTINGS))
    buffers = federation.setting.buffers
    models, received, found = kept(run, 3), kept(run, 2)["global"], lines[3]["measures"]

    def cosine(a, b):
        a, b = a.double().flatten(), b.double().flatten()
        return float((a @ b) / (a.norm() * b.norm())) if float(a.norm() * b.norm()) else 1.0

    layers = {
        name: np.mean([cosine(models[f"client-{k}"][name], received[name]) for k in range(4)])
        for name in received
        if name not in buffers
    }
    assert lines[3]["layers"] == pytest.approx(layers, abs=1e-5)
    assert found["layers/lowest"] == pytest.approx(min(layers.values()), abs=1e-5)
    assert found["layers/mean"] == pytest.approx(np.mean(list(layers.values())), abs=1e-5)

    def distance(a, b):
        names = [n for n in a if n not in federation.setting.running_statistics and a[n].is_floating_point()]
        return sum(math.sqrt(float((a[n].double() - b[n].double()).square().sum())) for n in names)

    local = [models[f"client-{k}"] for k in range(3)]
    to_global = np.mean([distance(w, models["global"]) for w in local])
    assert found["distances/global"] == pytest.approx(to_global, rel=1e-4)
    between = np.mean([distance(a, b) for a, b in combinations(local, 2)])
    assert found["distances/clients"] == pytest.approx(between, rel=1e-4)

    shown = [features(federation, w) for w in local]
    angles = []
    for a, b in combinations(shown, 2):
        for x, y in zip(a, b, strict=True):
            angles.append(math.degrees(math.acos(min(1, x @ y / np.linalg.norm(x) / np.linalg.norm(y)))))
    assert found["angles/mean"] == pytest.approx(np.mean(angles), abs=1e-2)
    for p in (5, 25, 50, 75, 95):
        assert found[f"angles/p{p}"] == pytest.approx(np.percentile(angles, p), abs=1e-2)

    for name, z in (("norms/h", False), ("norms/z", True)):
        norms = np.linalg.norm(features(federation, models["global"], z), axis=1)
        assert found[name] == pytest.approx(norms.mean(), rel=1e-4)


def test_a_resumed_run_keeps_the_same_files(run, tmp_path):
    short = [text for text in SETTINGS if "rounds=3" not in text]
    run_tiny(tmp_path / "run", *short, "train.rounds=1")
    again = run_tiny(tmp_path / "run", *SETTINGS, resume=True)
    for round in (0, 2, 3):
        expected, found = kept_models(run.folder, round), kept_models(again.folder, round)
        assert {name: path.read_bytes() for name, path in expected.items()} == {
            name: path.read_bytes() for name, path in found.items()
        }


def test_the_report_draws_measures_and_loss_terms(run):
    panels = figures(group_runs([read_folder(run.folder)]))["measures"]
    titles = [panel["title"] for panel in panels]
    assert titles[:3] == ["Loss term align_uniform", "Loss term dsr", "Loss term pd"]
    measured = [metric for metric in MEASURES if not metric.key.startswith("consensus")]
    assert len(titles) == 3 + len(measured)
    norm = panels[3]
    assert norm["series"][0]["x"] == [2, 3]
    line = run.metrics[-1]
    assert norm["series"][0]["y"][-1] == pytest.approx(line["measures"]["norms/h"], rel=1e-3)


def test_consensus_of_peers(tmp_path):
    gossip = ("method.name=peer_to_peer", "evaluation.measures=['consensus']", "train.keep_models_every=1")
    run = run_tiny(tmp_path / "run", *gossip, "options.gossip.deploys=each")
    models = [load(path) for path in kept_models(run.folder, 2).values()]
    assert len(models) == 4
    counted = set(models[0]) - Federation(tiny(*gossip)).setting.running_statistics
    squares = 0.0
    for name in counted:
        if models[0][name].is_floating_point():
            rows = torch.stack([model[name].double().flatten() for model in models])
            squares += float(((rows - rows.mean(0)) ** 2).sum()) / 4
    found = run.metrics[-1]["measures"]
    assert found["consensus/distance"] == pytest.approx(math.sqrt(squares), rel=1e-5)
    assert found["consensus/gap"] == pytest.approx(2 / 3)  # a cycle of four: eigenvalues 1, 1/3, 1/3, -1/3


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (("method.aggregation=private_fedavg", "train.bn_buffers=local"), "must not reveal the update"),
        (("method.name=local_only",), "no weights leave a client"),
    ],
)
def test_updates_that_are_hidden_are_neither_kept_nor_measured(settings, sentence):
    with pytest.raises(UserError, match=f"keep_local_models cannot keep local models: .*{sentence}"):
        Federation(tiny(*settings, "train.keep_local_models=[1]"))
    with pytest.raises(UserError, match=f"cannot measure 'angles': .*{sentence}"):
        Federation(tiny(*settings, "evaluation.measures=['angles', 'norms']"))


def test_norms_of_a_model_that_nobody_trains_are_not_measured():
    """The server of `local_only` holds the initial model."""
    with pytest.raises(
        UserError, match=r"cannot measure 'norms': with 'local_only' no model is shared; remove it"
    ):
        Federation(tiny("method.name=local_only", "evaluation.measures=['norms']"))


def test_consensus_needs_a_graph():
    with pytest.raises(
        UserError, match="cannot measure 'consensus' of 'fedavg', which has no graph of clients"
    ):
        Federation(tiny("evaluation.measures=['consensus']"))


def test_norms_of_several_models_are_means_over_clients(tmp_path):
    settings = (
        "method.name=peer_to_peer", "options.gossip.deploys=each", "train.rounds=1", "train.keep_models_every=1",
        "evaluation.measures=['norms']",
    )  # fmt: skip
    run = run_tiny(tmp_path / "run", *settings)
    federation = Federation(tiny(*settings))
    images, norms = federation.splits.held_out[1], []
    for weights in kept(run, 1).values():
        federation.load(weights)
        h = embed(federation.encoder, federation.views.plain, images.images)
        norms.append(float(h.double().norm(dim=1).mean()))
    assert len(set(norms)) == 4
    found = run.metrics[-1]["measures"]["norms/h"]
    assert found == pytest.approx(sum(norms) / 4, rel=1e-5)
