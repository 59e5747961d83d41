import pytest
import torch

from atoll.core.errors import UserError
from atoll.methods.fedu import drift
from tests.rounds import Rounds
from tests.steps import federation
from tests.trees import same

FEDU = ("method.name=fedu", "model.predictor_hidden=[16]")


def of_head(weights, head):
    return {name: value for name, value in weights.items() if name.startswith(head + ".")}


@pytest.fixture(scope="module")
def trained():
    """Client 0's first round, and the server's next models, which are not the client's."""
    rounds = Rounds(*FEDU)
    updates, kept = {}, {}
    for client in (0, 1):
        updates[client], kept[client] = rounds.train(client)
    rounds.fold(1, updates)
    return rounds.server.state, updates[0], kept[0]


def second_start(trained, *settings):
    state, _, kept = trained
    rounds = Rounds(*FEDU, *settings)
    rounds.server.state = state
    return rounds.start(0, 2, kept)


def test_a_low_divergence_takes_the_downloaded_predictor(trained):
    start = second_start(trained, "options.fedu.threshold=1e9")
    assert same(start, trained[0]["models"]["global"])  # μ = ∞: FedBYOL with a local target


def test_a_high_divergence_keeps_the_predictor_and_nothing_else(trained):
    state, update, _ = trained
    start = second_start(trained, "options.fedu.threshold=0.0")
    assert same(of_head(start, "predictor"), of_head(update["weights"], "predictor"))
    for head in ("encoder", "projector"):
        assert same(of_head(start, head), of_head(state["models"]["global"], head))
    assert not same(of_head(start, "predictor"), of_head(state["models"]["global"], "predictor"))


def test_the_divergence_is_the_mean_distance_of_the_encoders_kernels(trained):
    _, update, kept = trained
    start = Rounds(*FEDU).start(0)
    distances = [
        float((update["weights"][name].double() - value.double()).square().sum()) ** 0.5
        for name, value in start.items()
        if name.startswith("encoder.") and value.ndim == 4
    ]
    assert kept["parts"]["fedu"]["divergence"] == pytest.approx(sum(distances) / len(distances), rel=1e-5)


def test_the_predictor_is_kept_from_the_threshold_on(trained):
    divergence = trained[2]["parts"]["fedu"]["divergence"]
    start = second_start(trained, f"options.fedu.threshold={divergence!r}")
    assert same(of_head(start, "predictor"), of_head(trained[1]["weights"], "predictor"))


def test_the_numbers_of_a_drift():
    """The kernel moves by 3, the matrix by ‖(3, 4)‖ = 5; biases do not count, nor what is skipped or not shared."""
    layers = {"conv": torch.nn.Conv2d(1, 1, 1), "linear": torch.nn.Linear(2, 1), "own": torch.nn.Linear(2, 2)}
    encoder = torch.nn.ModuleDict(layers)
    before = {f"encoder.{name}": weight.detach().clone() for name, weight in encoder.named_parameters()}
    del before["encoder.own.weight"], before["encoder.own.bias"]
    with torch.no_grad():
        for weight in encoder.parameters():
            weight.add_(9.0)
        encoder["conv"].weight.add_(-6.0)
        encoder["linear"].weight.add_(torch.tensor([[-6.0, -5.0]]))
    assert drift(encoder, before) == pytest.approx(4.0)
    assert drift(encoder, before, ("conv", "absent")) == pytest.approx(5.0)
    assert drift(encoder, {}) == 0.0


def test_the_released_code_leaves_out_shortcuts():
    rounds = Rounds(*FEDU)
    rounds.train(0)
    context = rounds.client.context
    names = [name for name, value in context.networks["encoder"].named_parameters() if value.ndim == 4]
    assert any("downsample" in name for name in names)
    encoder = context.networks["encoder"]
    assert drift(encoder, context.received) != drift(encoder, context.received, ("downsample",))


def test_skipped_weights_do_not_count_in_what_a_client_keeps():
    start = Rounds(*FEDU).start(0)
    update, kept = Rounds(*FEDU, "options.fedu.skip=['downsample', 'conv2']").train(0)
    distances = [
        float((update["weights"][name].double() - value.double()).square().sum()) ** 0.5
        for name, value in start.items()
        if name.startswith("encoder.")
        and value.ndim == 4
        and "downsample" not in name
        and "conv2" not in name
    ]
    assert kept["parts"]["fedu"]["divergence"] == pytest.approx(sum(distances) / len(distances), rel=1e-5)


def test_the_target_stays_the_clients_own(trained):
    state, _, kept = trained
    rounds = Rounds(*FEDU)
    rounds.server.state = state
    rounds.start(0, 2, kept)
    target = rounds.client.copies["byol_target"].state_dict()
    assert all(torch.equal(target[name], value) for name, value in kept["parts"]["byol"].items())


def test_without_a_predictor_the_projector_stands_in():
    settings = ("method.name=fed_simclr", "method.merge=fedu", "options.fedu.threshold=0.0")
    rounds = Rounds(*settings)
    update, kept = rounds.train(0)
    assert same(of_head(rounds.start(0, 2, kept), "projector"), of_head(update["weights"], "projector"))


def test_without_any_head_it_is_refused():
    with pytest.raises(UserError, match="'fedu' decides whether a client retains its predictor or projector"):
        federation("method.name=fed_simclr", "method.merge=fedu", "model.projector=none")
