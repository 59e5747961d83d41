import pytest
import torch
from torch import nn

from atoll.core.errors import UserError
from atoll.core.tree import load
from atoll.methods.fedbn import norm_names
from tests.harness import final_models, run_tiny
from tests.rounds import Rounds
from tests.steps import federation
from tests.trees import same

FEDBN = ("method.name=fedbn",)


def test_every_batchnorm_is_found_by_its_type():
    networks = federation(*FEDBN).networks
    layers = [m for m in networks.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d)]
    names = norm_names(networks)
    assert len(names) == 5 * len(layers)  # γ, β, mean, variance, counter
    for name in ("encoder.bn1.weight", "encoder.layer2.0.downsample.1.bias", "projector.1.running_var"):
        assert name in names


def test_norms_stay_at_home_to_the_bit():
    rounds = Rounds(*FEDBN)
    updates, kept = {}, {}
    for client in (0, 1):
        updates[client], kept[client] = rounds.train(client)
    names = norm_names(rounds.federation.networks)
    assert not names & updates[0]["weights"].keys()
    assert updates[0]["weights"].keys() | names == set(rounds.federation.networks.state_dict())
    rounds.fold(1, updates)
    shared = rounds.server.state["models"]["global"]
    for client in (0, 1):
        start = rounds.start(client, 2, kept[client])
        assert same({name: start[name] for name in sorted(names)}, kept[client]["parts"]["fedbn"])
        assert all(torch.equal(start[name], shared[name]) for name in shared if name not in names)
    assert not same(kept[0], kept[1])


def test_each_client_ends_with_a_model_of_its_own(tmp_path):
    run = run_tiny(tmp_path / "run", *FEDBN)
    files = sorted(path.name for path in run.folder.glob("encoder-*.safetensors"))
    assert files == [f"encoder-client-{k}.safetensors" for k in range(4)]
    evaluation = run.read_json("evaluation.json")
    accuracies = [one["knn/accuracy"] for one in evaluation["by_model"].values()]
    assert evaluation["clients_by_model"] == {f"client-{k}": 1 for k in range(4)}
    assert evaluation["knn/accuracy"] == pytest.approx(sum(accuracies) / 4)
    from safetensors.torch import load_file

    kept = load(run.checkpoints / "clients/000002/000002.safetensors")["parts"]["fedbn"]
    encoder = load_file(run.folder / "encoder-client-2.safetensors")
    shared = final_models(run)["global"]
    for name, value in encoder.items():
        expected = kept.get(f"encoder.{name}", shared[f"encoder.{name}"])
        assert torch.equal(value, expected)


def test_networks_without_batchnorm_are_refused():
    vit = ("model.encoder=vit-tiny", "model.width=64", "model.depth=1", "model.stem=cifar")
    with pytest.raises(UserError, match="these networks have none"):
        federation(*FEDBN, *vit, "model.projector=none")


@pytest.mark.parametrize("home", ["method.merge=fedbn", "train.bn_buffers=local"])
@pytest.mark.parametrize("term", ["fedx", "moon", "featarc_alignment", "fedprox"])
def test_the_global_model_that_a_term_looks_to_is_the_one_that_training_begins_with(term, home):
    """With the server's own BatchNorm, which nobody ever trained, it would be no one's model."""
    rounds = Rounds("method.name=fed_simclr", f"method.terms=['{term}']", home)
    updates, kept = zip(*(rounds.train(client) for client in (0, 1)), strict=True)
    rounds.fold(1, dict(enumerate(updates)))
    start = rounds.start(0, 2, kept[0])
    if term == "fedprox":
        assert rounds.method.terms[0].loss(rounds.client.context, None, None).item() == 0
    else:
        assert same(rounds.client.copies["global"].state_dict(), start)


def test_a_client_that_never_took_part_is_not_measured(tmp_path):
    run = run_tiny(tmp_path / "run", *FEDBN, "train.participation=0.5", "train.rounds=1")
    took_part = {f"client-{client}" for client in run.latest()["valid"]}
    assert len(took_part) == 2
    evaluation = run.read_json("evaluation.json")
    assert evaluation["by_model"].keys() == took_part
    assert {path.name for path in run.folder.glob("encoder-*.safetensors")} == {
        f"encoder-{name}.safetensors" for name in took_part
    }
