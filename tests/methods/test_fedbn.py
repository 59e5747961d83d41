import pytest
import torch
from torch import nn

from atoll.errors import UserError
from atoll.methods.fedbn import norm_names
from atoll.tree import load, same
from harness import final_models, run_tiny
from rounds import Rounds
from steps import federation

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
