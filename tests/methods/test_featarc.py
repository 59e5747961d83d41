from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from atoll.core.errors import UserError
from atoll.core.tree import clone
from atoll.methods.featarc import ClusterFold, FeatARC
from atoll.methods.fedbn import norm_names
from tests.functional.oracles import mean_cosine, nt_xent
from tests.harness import run_tiny
from tests.rounds import Rounds
from tests.steps import Steps, check_gradient, federation
from tests.trees import same

FEATARC = ("method.name=featarc_cluster",)
ONE = "options.featarc.clusters=1"
UNEQUAL = "partition.kind=dirichlet"  # clients have different numbers of images


def encoder_of(weights):
    return {name: value for name, value in weights.items() if name.startswith("encoder.")}


@pytest.mark.parametrize(
    "settings",
    [
        ("method.name=featarc_cluster", ONE),
        ("method.name=featarc", ONE, "options.featarc_alignment.weight=0.0"),
    ],
)
def test_one_cluster_without_alignment_is_fedavg(tmp_path, settings):
    ours = run_tiny(tmp_path / "ours", *settings, UNEQUAL)
    theirs = run_tiny(
        tmp_path / "theirs", "method.name=fed_simclr", "options.fedavg.weights=uniform", UNEQUAL
    )
    assert ours.encoder_path.read_bytes() == theirs.encoder_path.read_bytes()


def test_one_cluster_with_alignment_is_align_only(tmp_path):
    ours = run_tiny(tmp_path / "ours", "method.name=featarc", ONE, UNEQUAL)
    theirs = run_tiny(tmp_path / "theirs", "method.name=featarc_align", UNEQUAL)
    assert ours.encoder_path.read_bytes() == theirs.encoder_path.read_bytes()


def test_the_clusters_are_drawn_independently():
    models = Rounds(*FEATARC, "options.featarc.clusters=3").server.state["models"]
    assert list(models) == ["cluster-0", "cluster-1", "cluster-2"]
    weights = [model["encoder.conv1.weight"] for model in models.values()]
    # The angle of independent Gaussian tensors is near a right one.
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert abs(mean_cosine(weights[a].reshape(1, -1), weights[b].reshape(1, -1))) < 0.5
    again = Rounds(*FEATARC, "options.featarc.clusters=3").server.state["models"]
    assert same(models, again)
    first = federation("method.name=fed_simclr").initial_weights()
    assert same(models["cluster-0"], first)


def test_a_client_begins_in_cluster_k_mod_c_and_then_chooses_by_features():
    rounds = Rounds(*FEATARC)
    models = rounds.server.state["models"]
    assert [rounds.train(client)[0]["parts"]["featarc"] for client in (0, 1, 2)] == [
        "cluster-0",
        "cluster-1",
        "cluster-0",
    ]
    for name, model in models.items():
        retained = {"parts": {"featarc": encoder_of(model)}}
        for client in (0, 1):
            start = rounds.start(client, 2, retained)
            assert same(start, model)
            assert rounds.client.context.of(rounds.method.aggregation).chosen == name


@pytest.mark.parametrize("output", ["h", "z"])
def test_the_choice_is_the_largest_mean_cosine(output):
    rounds = Rounds(*FEATARC, f"options.featarc.features={output}")
    _, kept = rounds.train(1)
    rounds.start(1, 2, kept)
    chosen = rounds.client.context.of(rounds.method.aggregation).chosen
    alike = similarities(rounds, kept["parts"]["featarc"], output)
    assert chosen == max(alike, key=alike.get)


def test_the_choice_averages_the_rows_cosines(monkeypatch):
    """Mean cosines 0, 0.71 and 0.8; the inner products of the second are largest, as is the cosine of its mean."""
    past = torch.eye(2)
    features = {
        "cluster-0": [[0.0, 9.0], [9.0, 0.0]],
        "cluster-1": [[5.0, 5.0], [5.0, 5.0]],
        "cluster-2": [[0.8, 0.6], [0.6, 0.8]],
    }
    made = {name: torch.tensor(rows) for name, rows in features.items()}
    monkeypatch.setattr(FeatARC, "_features", lambda _, __, weights: weights["features"])
    rounds = Rounds(*FEATARC, "options.featarc.clusters=3")
    context, aggregation = rounds.client_context(), rounds.method.aggregation
    context.of(aggregation).retained = {"features": past}
    context.shared = frozenset({"features"})
    aggregation.choose(context, {name: {"features": rows} for name, rows in made.items()})
    assert context.of(aggregation).chosen == "cluster-2"


@pytest.mark.parametrize(("output", "heads"), [("h", ("encoder.",)), ("z", ("encoder.", "projector."))])
def test_a_client_keeps_the_networks_that_the_features_need(output, heads):
    frozen = "encoder.conv1.weight"
    rounds = Rounds(*FEATARC, f"options.featarc.features={output}", f"model.freeze=['{frozen}']")
    _, kept = rounds.train(0)
    trained = rounds.federation.networks.state_dict()
    needed = {name: weight for name, weight in trained.items() if name.startswith(heads) and name != frozen}
    assert same(kept["parts"]["featarc"], needed)


def test_embeddings_choose_where_representations_would_choose_the_other_cluster():
    rounds = Rounds(*FEATARC, "options.featarc.features=z")
    first, second = rounds.server.state["models"].values()
    # The same encoder in both clusters, and the second's projector at the client.
    models = {"cluster-0": first, "cluster-1": {**second, **encoder_of(first)}}
    rounds.server.state["models"] = models
    retained = {
        name: w for name, w in models["cluster-1"].items() if name.startswith(("encoder.", "projector."))
    }
    rounds.start(0, 2, {"parts": {"featarc": retained}})
    chosen = rounds.client.context.of(rounds.method.aggregation).chosen
    assert len(set(similarities(rounds, retained, "h").values())) == 1
    assert chosen == "cluster-1"


def similarities(rounds, retained, output):
    """Mean cosine between the retained networks' outputs and each cluster's, on client 1's images."""
    data, networks = rounds.federation.client_data(1), rounds.federation.networks
    images = data.pick(torch.arange(data.num_samples))

    def features(weights):
        networks.load_state_dict({**networks.state_dict(), **weights})
        networks.eval()
        with torch.no_grad():
            h = networks["encoder"](images)
            return h if output == "h" else networks["projector"](h)

    past = features(retained)
    found = {
        name: mean_cosine(features(model), past) for name, model in rounds.server.state["models"].items()
    }
    networks.train()
    return found


def test_a_subclass_of_another_name_folds_its_own_choices():
    added = []
    fold = ClusterFold("renamed", {"cluster-0": SimpleNamespace(add=lambda *one: added.append(one))})
    fold.add(3, {"parts": {"renamed": "cluster-0"}}, None)
    assert [client for client, *_ in added] == [3]


def test_embeddings_are_there_where_the_assignment_compares_them():
    settings = ("method.name=fed_sl", "method.aggregation=featarc", "options.featarc.features=z")
    assert any(
        name.startswith("projector.") for name in Rounds(*settings).server.state["models"]["cluster-0"]
    )
    assert not FeatARC(features="z", clusters=1).embeds()


def test_a_cluster_is_the_mean_of_its_clients_and_stays_without_any():
    rounds = Rounds(*FEATARC, "options.featarc.clusters=3")
    before = clone(rounds.server.state["models"])
    updates = {client: rounds.train(client)[0] for client in (0, 1, 3)}  # clusters 0, 1 and 0
    rounds.fold(1, updates)
    after = rounds.server.state["models"]
    name = "encoder.conv1.weight"
    torch.testing.assert_close(
        after["cluster-0"][name], (updates[0]["weights"][name] + updates[3]["weights"][name]) / 2
    )
    assert torch.equal(after["cluster-1"][name], updates[1]["weights"][name])
    assert same(after["cluster-2"], before["cluster-2"])


def test_it_says_which_client_uses_which_cluster():
    rounds = Rounds(*FEATARC)
    update, _ = rounds.train(0)
    moved = {**update, "parts": {"featarc": "cluster-1"}}
    rounds.fold(1, {0: moved})
    deployment = rounds.server.deploy()
    assert deployment.choice == {0: "cluster-1", 1: "cluster-1", 2: "cluster-0", 3: "cluster-1"}
    assert list(deployment.models) == ["cluster-0", "cluster-1"]


def test_a_run_ends_with_its_clusters(tmp_path):
    run = run_tiny(tmp_path / "run", "method.name=featarc")
    assert len(list(run.folder.glob("encoder-cluster-*.safetensors"))) == 2
    users = run.read_json("evaluation.json")["clients_by_model"]
    assert set(users) == {"cluster-0", "cluster-1"}
    assert sum(users.values()) == 4


def test_an_update_must_name_a_cluster():
    rounds = Rounds(*FEATARC)
    update, _ = rounds.train(0)
    assert rounds.refused(update) is None
    assert rounds.refused({**update, "parts": {"featarc": "cluster-9"}}) == (
        "its slice of 'featarc' is 'cluster-9', not one of 'cluster-0', 'cluster-1'"
    )
    verdict = rounds.server.checks.examine({**update, "parts": {}}, rounds.server.state["models"])
    assert verdict == "it does not name a model that it was sent"
    with pytest.raises(UserError, match=r"options\.featarc\.clusters is 0; it must be above 0"):
        federation(*FEATARC, "options.featarc.clusters=0")


@pytest.mark.parametrize(
    ("reading", "objective"),
    [("code", "simclr"), ("code", "simsiam"), ("paper", "simclr"), ("paper", "simsiam")],
)
def test_the_regulariser_is_the_mean_of_two_distances(reading, objective):
    steps = Steps(
        "method.name=featarc_align",
        f"method.objective={objective}",
        f"options.featarc_alignment.reading={reading}",
        "model.predictor_hidden=[16]",
    )
    batch, received = steps.batch(), steps.federation.initial_weights()
    with torch.no_grad():
        for parameter in steps.networks.parameters():
            parameter.mul_(1.1)  # so that the local networks are not the received ones
    steps.client.step(batch)
    loss = steps.client._losses["featarc_alignment"][0].item()
    networks = federation("method.name=featarc_align", f"method.objective={objective}", "seed=3",
                          "model.predictor_hidden=[16]").networks  # fmt: skip
    networks.load_state_dict(received)
    networks.eval()
    h, z = steps.encode(steps.data.pick(batch.indices), networks)
    if reading == "code":
        outputs = [steps.encode(batch.images[view])[1] for view in ("view1", "view2")]
        expected = -(mean_cosine(outputs[0], h) + mean_cosine(outputs[1], h)) / 2
    else:
        outputs = [steps.encode(images)[1] for images in (batch.images["view1"], batch.images["image"])]
        if objective == "simsiam":
            with torch.no_grad():
                outputs = [steps.networks["predictor"](made) for made in outputs]
        expected = -(mean_cosine(outputs[0], z) + mean_cosine(outputs[1], z)) / 2
    assert loss == pytest.approx(expected, rel=1e-3)
    assert -1 <= loss <= 1


def test_the_regulariser_pulls_the_embeddings_of_both_views():
    steps = Steps("method.name=featarc_align")
    batch, temperature = steps.batch(), steps.federation.recipe.composed.objective.temperature
    steps.networks.eval()
    h, _ = steps.encode(steps.data.pick(batch.indices))
    steps.networks.train()

    def loss(moved):
        z1, z2 = (steps.encode(batch.images[view].double(), moved)[1] for view in ("view1", "view2"))
        return nt_xent(z1, z2, temperature) - (mean_cosine(z1, h) + mean_cosine(z2, h)) / 2

    check_gradient(steps.networks, steps.client.step(batch), loss)


def test_the_anchors_are_the_downloaded_models_where_a_client_begins_with_another():
    """The paper's anchors are embeddings, and the client begins with its own projector."""
    settings = ("method.merge=fedu", "options.fedu.threshold=0.0", "options.featarc_alignment.reading=paper")
    rounds = Rounds("method.name=featarc_align", *settings)
    _, kept = rounds.train(0)
    rounds.start(0, 2, kept)
    (alignment,) = rounds.method.terms
    anchors = rounds.client.context.of(alignment).anchors
    networks, data = rounds.federation.networks, rounds.federation.client_data(0)
    downloaded = rounds.server.state["models"]["global"]
    assert not same(clone(networks.state_dict()), downloaded)
    networks.load_state_dict(downloaded)
    with torch.no_grad():
        z = networks.eval()["projector"](networks["encoder"](data.pick(torch.arange(data.num_samples))))
    networks.train()
    torch.testing.assert_close(anchors, z)


def test_the_code_needs_representations_and_embeddings_of_one_size():
    with pytest.raises(
        UserError, match=r"set model\.projector_dim = 32 or options\.featarc_alignment\.reading"
    ):
        federation("method.name=featarc", "model.projector_dim=16")
    federation("method.name=featarc", "model.projector_dim=16", "options.featarc_alignment.reading=paper")


def test_by_hand_further_models_must_be_given():
    setting = Rounds(*FEATARC).federation.setting
    with pytest.raises(ValueError, match="further initial models"):
        FeatARC().models({}, replace(setting, further_models=None))


def test_a_client_chooses_by_models_with_its_own_batchnorm():
    """The server's is the one that training began with, and no model's."""
    rounds = Rounds(*FEATARC, "method.merge=fedbn")
    _, kept = rounds.train(1)
    rounds.start(1, 2, kept)
    last = rounds.client.copies["featarc"].state_dict()  # the last cluster, as its features were computed
    retained, model = kept["parts"]["featarc"], rounds.server.state["models"]["cluster-1"]
    norms = norm_names(rounds.federation.networks)
    for name in encoder_of(model):
        assert torch.equal(last[name], retained[name] if name in norms else model[name])


def test_a_server_step_leaves_a_cluster_that_nobody_chose():
    rounds = Rounds(*FEATARC, "method.server=fedavgm")
    rounds.fold(1, {client: rounds.train(client)[0] for client in (0, 1)})
    before = clone(rounds.server.state)
    rounds.fold(2, {0: rounds.train(0, 2)[0]})
    (chosen,) = {rounds.server.state["parts"]["featarc"]["0"]}
    (other,) = {"cluster-0", "cluster-1"} - {chosen}
    after = rounds.server.state
    assert same(after["models"][other], before["models"][other])
    assert same(after["parts"]["fedavgm"][other], before["parts"]["fedavgm"][other])
    assert not same(after["models"][chosen], before["models"][chosen])


def test_the_clusters_heads_are_drawn_independently_too():
    models = Rounds("method.name=fed_pr", "method.aggregation=featarc").server.state["models"]
    heads = [model["rotation_head.weight"] for model in models.values()]
    assert not torch.equal(*heads)
