import pytest
import torch

from atoll.core.tree import clone
from tests.rounds import Rounds
from tests.trees import same

FEDEMA = ("method.name=fedema", "model.predictor_hidden=[16]")


@pytest.fixture(scope="module")
def trained():
    """Client 0's first round, and the server's next models, which are not the client's."""
    rounds = Rounds(*FEDEMA)
    updates, kept = {}, {}
    for client in (0, 1):
        updates[client], kept[client] = rounds.train(client)
    rounds.fold(1, updates)
    return rounds, updates[0]["weights"], kept[0]


def with_state(kept, **changes):
    changed = clone(kept)
    changed["parts"]["fedema"] |= changes
    return changed


def test_mu_is_the_scaled_divergence_and_at_most_one(trained):
    rounds, scope, kept = trained
    downloaded = rounds.server.state["models"]["global"]
    parameters = kept["parts"]["fedema"]["parameters"]
    # All trained weights: those of the encoder, the projector and the predictor.
    assert parameters.keys() == dict(rounds.federation.networks.named_parameters()).keys()
    # d = 0.5 at first and τ = 0.7 give λ = 1.4; then d = 0.25 gives μ = 0.35.
    start = rounds.start(0, 2, with_state(kept, scaler=1.4, divergence=0.25))
    for name, value in start.items():
        expected = 0.35 * scope[name] + 0.65 * downloaded[name] if name in parameters else downloaded[name]
        torch.testing.assert_close(value, expected, check_dtype=False)
    far = rounds.start(0, 2, with_state(kept, scaler=1.4, divergence=5.0))
    assert same({name: far[name] for name in parameters}, {name: scope[name] for name in parameters})
    near = rounds.start(0, 2, with_state(kept, scaler=1.4, divergence=0.0))
    assert same(near, downloaded)


def test_the_statistics_of_batchnorm_come_from_the_server(trained):
    rounds, scope, kept = trained
    start = rounds.start(0, 2, with_state(kept, scaler=1.0, divergence=9.0))
    name = "encoder.bn1.running_mean"
    assert torch.equal(start[name], rounds.server.state["models"]["global"][name])
    assert not torch.equal(start[name], scope[name])


def test_the_scaler_is_set_once_from_the_first_divergence(trained):
    rounds, _, kept = trained
    first = kept["parts"]["fedema"]
    assert first["scaler"] * first["divergence"] == pytest.approx(0.7)
    _, again = rounds.train(0, 2, kept)
    assert again["parts"]["fedema"]["scaler"] == first["scaler"]
    assert again["parts"]["fedema"]["divergence"] != first["divergence"]


def test_the_divergence_is_measured_from_the_mixture_with_which_training_began(trained):
    rounds, _, kept = trained
    half = with_state(kept, scaler=1.0, divergence=0.5)
    start = {name: value.double() for name, value in rounds.start(0, 2, half).items()}
    update, again = rounds.train(0, 2, half)
    distances = [
        float((update["weights"][name].double() - value).square().sum()) ** 0.5
        for name, value in start.items()
        if name.startswith("encoder.") and value.ndim >= 2
    ]
    assert again["parts"]["fedema"]["divergence"] == pytest.approx(sum(distances) / len(distances), rel=1e-5)


def test_skipped_weights_do_not_count_in_the_divergence():
    rounds = Rounds(*FEDEMA, "options.fedema.skip=['downsample', 'conv2']")
    start = rounds.start(0)
    update, kept = rounds.train(0)
    distances = [
        float((update["weights"][name].double() - value.double()).square().sum()) ** 0.5
        for name, value in start.items()
        if name.startswith("encoder.")
        and value.ndim >= 2
        and "downsample" not in name
        and "conv2" not in name
    ]
    assert kept["parts"]["fedema"]["divergence"] == pytest.approx(sum(distances) / len(distances), rel=1e-5)


def test_a_client_does_not_keep_frozen_weights():
    rounds = Rounds(*FEDEMA, "model.freeze=['encoder.conv1.*']")
    names = dict(rounds.federation.networks.named_parameters()).keys()
    _, kept = rounds.train(0)
    assert names - kept["parts"]["fedema"]["parameters"].keys() == {
        name for name in names if name.startswith("encoder.conv1.")
    }


def test_a_client_that_missed_a_round_starts_online_and_target_anew(trained):
    rounds, _, kept = trained
    downloaded = rounds.server.state["models"]["global"]
    assert same(rounds.start(0, 3, kept), downloaded)
    target = rounds.client.copies["byol_target"].state_dict()
    assert all(torch.equal(target[name], downloaded[name]) for name in kept["parts"]["byol"])
    rounds.start(0, 2, kept)
    target = rounds.client.copies["byol_target"].state_dict()
    assert all(torch.equal(target[name], value) for name, value in kept["parts"]["byol"].items())


def test_a_client_that_did_not_move_measures_again(trained):
    rounds, _, _ = trained
    message = {**rounds.message(0, 1), "epochs": 0}
    _, kept = rounds.train(0, message=message)
    assert kept["parts"]["fedema"]["scaler"] == kept["parts"]["fedema"]["divergence"] == 0
    _, kept = rounds.train(0, 2, kept)
    assert kept["parts"]["fedema"]["scaler"] > 0


def test_weights_that_a_client_trains_for_itself_do_not_count_in_the_divergence():
    shared = "encoder.conv1."
    rounds = Rounds(*FEDEMA, f"method.share=['{shared}*', 'projector.*']", "train.bn_buffers=local")
    kept = {}
    for round in (1, 2):
        start = rounds.start(0, round, kept.get(0))[f"{shared}weight"].double()
        updates = {}
        for client in (0, 1):
            updates[client], kept[client] = rounds.train(client, round, kept.get(client))
        end = updates[0]["weights"][f"{shared}weight"].double()
        distance = float((end - start).square().sum()) ** 0.5
        assert kept[0]["parts"]["fedema"]["divergence"] == pytest.approx(distance, rel=1e-5)
        rounds.fold(round, updates)
