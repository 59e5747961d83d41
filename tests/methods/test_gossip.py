import itertools
from dataclasses import replace
from types import SimpleNamespace

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.errors import UserError
from atoll.core.tree import clone
from atoll.engines.jobs import Result
from atoll.functional import metropolis_weights
from atoll.methods.gossip import GRAPHS, Gossip
from atoll.models import load_encoder
from tests.harness import final_models, run_tiny
from tests.rounds import Rounds
from tests.steps import federation
from tests.trees import same

P2P = "method.name=peer_to_peer"
ORACLES = {
    "cycle": nx.cycle_graph,
    "tree": lambda clients: nx.full_rary_tree(2, clients),
    "star": lambda clients: nx.star_graph(clients - 1),
    "complete": nx.complete_graph,
}


def world(clients, seed=0):
    """As much of a setting as gossip reads."""
    return SimpleNamespace(num_clients=clients, seed=seed, personal=False)


@pytest.mark.parametrize("topology", GRAPHS)
@pytest.mark.parametrize("clients", [1, 2, 3, 7, 10, 20])
def test_graphs_are_networkx_own(topology, clients):
    edges = Gossip(topology=topology).graph(world(clients))
    expected = nx.to_numpy_array(ORACLES[topology](clients)) > 0
    np.fill_diagonal(expected, False)
    assert np.array_equal(edges.numpy(), expected)
    assert Gossip(topology=topology).refuse(world(clients)) is None


@given(st.integers(2, 30), st.integers(0, 50), st.floats(0.3, 1.0))
def test_random_graphs_are_connected_symmetric_and_the_seeds_own(clients, seed, p):
    component = Gossip(topology="random", edge_probability=p)
    edges = component.graph(world(clients, seed))
    assert torch.equal(edges, edges.T)
    assert not edges.diagonal().any()
    assert nx.is_connected(nx.from_numpy_array(edges.numpy()))
    assert torch.equal(edges, component.graph(world(clients, seed)))


def test_random_graphs_have_as_many_edges_as_they_should():
    component = Gossip(topology="random", edge_probability=0.7)
    edges = torch.stack([component.graph(world(20, seed)) for seed in range(100)])
    assert edges.float().sum() / (100 * 20 * 19) == pytest.approx(0.7, abs=0.01)
    assert not torch.equal(edges[0], edges[1])


@settings(deadline=None)
@given(st.sampled_from(sorted(GRAPHS)), st.integers(1, 8), st.data())
def test_a_gossip_step_is_a_matrix_product_and_keeps_the_mean(topology, clients, data):
    """Clients that send nothing count with the model that they had."""
    component, setting = Gossip(topology=topology), world(clients)
    draws = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    present = data.draw(st.sets(st.integers(0, clients - 1)))
    old, new = torch.randn(2, clients, 6, generator=draws)
    models = {f"client-{k}": {"w": old[k], "n": torch.tensor(k)} for k in range(clients)}
    fold = component.open(models, setting, 1, None)
    for client in sorted(present):
        fold.add(client, {"weights": {"w": new[client], "n": torch.tensor(100 + client)}}, None)
    mixed = fold.close()
    trained = torch.stack([new[k] if k in present else old[k] for k in range(clients)]).double()
    weights = metropolis_weights(component.graph(setting).double())
    expected = weights @ trained
    got = torch.stack([mixed[f"client-{k}"]["w"] for k in range(clients)])
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(got.double().mean(0), trained.mean(0), atol=1e-5, rtol=1e-4)
    counters = [100 + k if k in present else k for k in range(clients)]
    for k in range(clients):
        heard = [counters[j] for j in range(clients) if weights[k, j] > 0]
        assert mixed[f"client-{k}"]["n"].item() == max(heard)
        assert mixed[f"client-{k}"]["n"].dtype == torch.int64


def test_repeated_steps_agree_on_the_mean():
    component, setting = Gossip(topology="tree"), world(7)
    models = {f"client-{k}": {"w": torch.eye(7)[k]} for k in range(7)}
    for _ in range(300):
        models = component.open(models, setting, 1, None).close()
    for model in models.values():
        torch.testing.assert_close(model["w"], torch.full((7,), 1 / 7), atol=1e-4, rtol=0)


def test_on_a_complete_graph_it_is_uniform_fedavg(tmp_path):
    gossip = run_tiny(tmp_path / "gossip", P2P, "options.gossip.topology=complete")
    fedavg = run_tiny(tmp_path / "fedavg", "method.name=fed_simclr", "options.fedavg.weights=uniform")
    (expected,) = final_models(fedavg).values()
    for model in final_models(gossip).values():
        for name, tensor in model.items():
            torch.testing.assert_close(tensor, expected[name], atol=1e-4, rtol=1e-3)


def test_a_client_gets_its_own_model_and_hears_of_its_neighbours_alone():
    rounds = Rounds(P2P, "partition.clients=5", "data.limit=200")
    start = rounds.server.state["models"]["client-0"]
    rounds.fold(1, {3: rounds.train(3)[0]})
    models = rounds.server.state["models"]
    assert [same(models[f"client-{k}"], start) for k in range(5)] == [True, True, False, False, False]
    for client in range(5):
        sent = rounds.message(client, 2)["models"]
        assert list(sent) == ["own"]
        assert same(sent["own"], models[f"client-{client}"])


class Still:
    """Clients that send back what they got."""

    def run(self, jobs, progress):
        for job in jobs:
            retained = clone(job.message["models"]["own"])
            yield Result(
                job.client, {"weights": retained, "parts": {}, "losses": {"loss": 1.0, "simclr": 1.0}}
            )


def test_the_door_measures_from_the_clients_own_model():
    rounds = Rounds(P2P)
    rounds.fold(1, {k: rounds.train(k)[0] for k in range(3)})
    models = list(rounds.server.state["models"].values())
    assert not any(same(one, other) for one, other in itertools.combinations(models, 2))
    with pytest.warns(UserWarning, match="no weight that leaves them changed"):
        assert rounds.server.run_round(Still()).clients == 4
    assert rounds.server.checkpoint()["norms"] == []


def test_the_door_bounds_updates_by_those_before(tmp_path):
    rounds = Rounds(P2P)
    updates = {k: rounds.train(k)[0] for k in range(4)}

    class Far(Still):
        def run(self, jobs, progress):
            for result in Still.run(self, jobs, progress):
                far = result.client == 2 and rounds.server.round > 0
                moved = updates[result.client]["weights"]
                weights = {n: t + 9 if far and t.is_floating_point() else t for n, t in moved.items()}
                yield replace(result, update={**result.update, "weights": weights})

    assert rounds.server.run_round(Far()).clients == 4
    record = rounds.server.run_round(Far())
    assert list(record.refused) == ["2"]
    assert "train.norm_factor" in record.refused["2"]


@pytest.mark.parametrize("private", ["method.merge=fedbn", "train.bn_buffers=local"])
def test_with_weights_of_their_own_clients_end_with_their_own_models(private, tmp_path):
    run = run_tiny(tmp_path / "run", P2P, private, "options.gossip.deploys=each")
    models = final_models(run)
    for client, model in models.items():
        encoder = load_encoder(run.folder / f"encoder-{client}.safetensors").state_dict()
        assert torch.equal(encoder["conv1.weight"], model["encoder.conv1.weight"])
        assert not torch.equal(encoder["bn1.running_mean"], torch.zeros(4))


def test_a_run_ends_with_the_mean_or_with_each_clients_own(tmp_path):
    mean = run_tiny(tmp_path / "mean", P2P)
    models = list(final_models(mean).values())
    deployed = Gossip().deploy(final_models(mean), {}).models
    assert list(deployed) == ["mean"]
    for name, tensor in deployed["mean"].items():
        stack = torch.stack([model[name] for model in models])
        expected = stack.double().mean(0) if tensor.is_floating_point() else stack.max(0).values
        torch.testing.assert_close(tensor.to(expected.dtype), expected, atol=1e-6, rtol=1e-5)
    assert "by_model" not in mean.read_json("evaluation.json")
    each = run_tiny(tmp_path / "each", P2P, "options.gossip.deploys=each")
    results = each.read_json("evaluation.json")
    assert results["clients_by_model"] == {f"client-{k}": 1 for k in range(4)}
    accuracies = [one["knn/accuracy"] for one in results["by_model"].values()]
    assert results["knn/accuracy"] == pytest.approx(np.mean(accuracies))
    assert len(list(each.folder.glob("encoder-client-*.safetensors"))) == 4


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        (["method.terms=['scaffold']"], "'gossip' covers weights only, and 'scaffold' sends more"),
        (["method.merge=local_only"], "no weights leave a client"),
        (
            ["options.gossip.topology=random", "options.gossip.edge_probability=0.001"],
            "1,000 random graphs of 4 clients with edges of probability 0.001 were not connected",
        ),
        (["method.merge=fedbn"], r"set options\.gossip\.deploys = 'each'"),
        (["train.bn_buffers=local"], "the mean of their models is not a model of any client"),
        (["method.server=fedavgm"], "'gossip' works without a server, and 'fedavgm' is a server step"),
        (
            ["options.gossip.edge_probability=0"],
            r"options\.gossip\.edge_probability is 0; it must be above 0 and at most 1",
        ),
    ],
)
def test_what_cannot_be_is_refused(changed, sentence):
    with pytest.raises(UserError, match=sentence):
        federation(P2P, *changed)


def test_a_graph_that_is_redrawn_differs_by_round_and_follows_the_seed():
    component = Gossip(topology="random", edge_probability=0.3, redraw=True)
    graphs = [component.graph(world(8), round) for round in (1, 2, 3)]
    assert not torch.equal(graphs[0], graphs[1])
    assert torch.equal(graphs[1], component.graph(world(8), 2))
    assert all(torch.equal(edges, edges.T) for edges in graphs)
    share = torch.stack([component.graph(world(20), round) for round in range(200)]).float().mean()
    assert float(share) == pytest.approx(0.3 * 19 / 20, abs=0.01)
    assert component.refuse(world(8)) is None
    assert "needs a random graph" in Gossip(redraw=True).refuse(world(8))
    sparse = Gossip(topology="random", edge_probability=0.01, redraw=True)
    assert sparse.refuse(world(8)) is None  # models meet over the rounds, not in each


def test_links_that_fail_are_left_out_and_the_mean_is_kept():
    component, setting = Gossip(topology="complete", drop=0.4), world(6)
    whole, links = component.graph(setting, 1), [component.links(setting, round) for round in range(300)]
    assert all(torch.equal(edges, edges.T) and not (edges & ~whole).any() for edges in links)
    assert float(torch.stack(links).float().sum()) / (300 * 30) == pytest.approx(0.6, abs=0.02)
    models = {f"client-{k}": {"w": torch.eye(6)[k]} for k in range(6)}
    mixed = component.open(models, setting, 5, None).close()
    got = torch.stack([model["w"] for model in mixed.values()])
    torch.testing.assert_close(got.double(), metropolis_weights(links[5].double()), atol=1e-6, rtol=0)
    torch.testing.assert_close(got.mean(0), torch.full((6,), 1 / 6))


def test_without_failures_the_links_are_the_graph():
    assert torch.equal(Gossip().links(world(5), 3), Gossip().graph(world(5)))
