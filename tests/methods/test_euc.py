import pytest
import torch

from atoll.core.errors import UserError
from atoll.methods.euc import EUC, METHOD, slow_layers
from tests.folds import setting
from tests.harness import final_models, run_tiny
from tests.rounds import Rounds
from tests.trees import same

NAME = ("method.name=euc",)


def test_slow_layers_by_hand():
    """Sorted by d: c, a, b. Shares of Σ d·dim up to each: 1/10, 4/10, 1; of dim: 1/4, 3/4, 1.

    1 − 1/4 is above 1/10, 1 − 3/4 is below 4/10: c and a are exchanged less often.
    """
    distances = {"a": (3.0, 60), "b": (6.0, 30), "c": (1.0, 30)}
    assert slow_layers(distances) == {"a", "c"}


def test_layers_that_are_all_alike_are_slow_up_to_the_half():
    """1 − i/4 < i/4 first at i = 3."""
    assert slow_layers(dict.fromkeys("abcd", (1.0, 10))) == {"a", "b", "c"}


def test_clients_that_agree_keep_every_layer_due():
    assert slow_layers({"a": (0.0, 3), "b": (0.0, 4)}) == set()


@pytest.fixture(scope="module")
def completed_rounds():
    """Two rounds of two clients; then the third begins."""
    rounds = Rounds(*NAME)
    kept = {0: None, 1: None}
    for round in (1, 2):
        trained = {client: rounds.train(client, round, kept[client]) for client in kept}
        rounds.fold(round, {client: update for client, (update, _) in trained.items()})
        kept = {client: retained for client, (_, retained) in trained.items()}
    return rounds, kept


def test_nothing_is_measured_before_all_layers_are_due_again(completed_rounds):
    rounds, _ = completed_rounds
    assert rounds.server.state["parts"]["euc"] == {"slow": []}
    fresh, _ = Rounds(*NAME).train(0)
    assert fresh["parts"] == {}


def test_a_client_measures_the_download_against_its_own(completed_rounds):
    rounds, kept = completed_rounds
    update, _ = rounds.train(0, 3, kept[0])
    downloaded = rounds.server.state["models"]["global"]
    layers = kept[0]["parts"]["euc"]["layers"]
    assert all(layer.ndim >= 2 for layer in layers.values())
    assert set(layers) == set(update["parts"]["euc"])
    for name, (distance, size) in update["parts"]["euc"].items():
        exact = float((downloaded[name].double() - layers[name].double()).square().sum())
        assert distance == pytest.approx(exact, rel=1e-4)
        assert size == layers[name].numel()


def test_the_server_chooses_slow_layers_and_they_stay_at_the_client(completed_rounds):
    before, kept = completed_rounds
    rounds = Rounds(*NAME)
    rounds.server.state = before.server.state
    updates, owns = {}, {}
    for client in (0, 1):
        updates[client], owns[client] = rounds.train(client, 3, kept[client])
    rounds.fold(3, updates)
    slow = set(rounds.server.state["parts"]["euc"]["slow"])
    pieces = [update["parts"]["euc"] for update in updates.values()]
    means = {name: (sum(piece[name][0] for piece in pieces) / 2, pieces[0][name][1]) for name in pieces[0]}
    assert slow == slow_layers(means)
    assert 0 < len(slow) < len(means)

    downloaded, scope = rounds.server.state["models"]["global"], updates[0]["weights"]
    start = rounds.start(0, 4, owns[0])
    for name, tensor in start.items():
        assert torch.equal(tensor, scope[name] if name in slow else downloaded[name])
    assert same(rounds.start(0, 5, owns[0]), downloaded)  # all are due again
    assert same(rounds.start(2, 4, None), downloaded)  # a client's first time

    # Distances of layers that were exchanged half as often count half.
    _, retained = rounds.train(0, 4, owns[0])
    halved, _ = rounds.train(0, 5, retained)
    for name, (distance, _) in halved["parts"]["euc"].items():
        exact = float((downloaded[name] - retained["parts"]["euc"]["layers"][name]).square().sum())
        assert distance == pytest.approx(exact / (2 if name in slow else 1), rel=1e-4)


def due_again(interval=4):
    """A federation in round 7, between the exchanges of rounds 5 and 9, and its slow layer."""
    rounds = Rounds(*NAME, f"options.euc.interval={interval}")
    slow = "encoder.conv1.weight"
    rounds.server.state["parts"]["euc"] = {"slow": [slow]}
    return rounds, slow


def test_a_layer_from_before_its_last_exchange_is_taken_from_the_server():
    rounds, slow = due_again()
    _, early = rounds.train(0, 3)  # took all in round 3; the layer was due in round 5, without this client
    downloaded = rounds.server.state["models"]["global"]
    assert same(rounds.start(0, 7, early), downloaded)
    _, late = rounds.train(0, 7, early)
    assert late["parts"]["euc"]["taken"] == dict.fromkeys(late["parts"]["euc"]["layers"], 7)
    # What it took in round 7 is its own in round 8, and due in round 9.
    assert torch.equal(rounds.start(0, 8, late)[slow], late["parts"]["euc"]["layers"][slow])
    assert same(rounds.start(0, 9, late), downloaded)


@pytest.mark.parametrize("seen", [5, 6])
def test_a_layer_from_its_last_exchange_on_stays_the_clients_own(seen):
    rounds, slow = due_again()
    _, retained = rounds.train(0, seen)
    assert torch.equal(rounds.start(0, 7, retained)[slow], retained["parts"]["euc"]["layers"][slow])


def test_distances_are_over_the_rounds_since_a_layer_was_taken():
    rounds, slow = due_again()
    _, retained = rounds.train(0, 5)
    _, retained = rounds.train(0, 7, retained)
    taken = retained["parts"]["euc"]["taken"]
    assert taken[slow] == 5
    assert {round for name, round in taken.items() if name != slow} == {7}
    update, _ = rounds.train(0, 13, retained)  # absent when all were due in round 9
    downloaded = rounds.server.state["models"]["global"]
    for name, (distance, _) in update["parts"]["euc"].items():
        exact = float((downloaded[name].double() - retained["parts"]["euc"]["layers"][name]).square().sum())
        assert distance == pytest.approx(exact / (13 - taken[name]), rel=1e-4)


@pytest.mark.parametrize(
    ("partial", "absent"),
    [("model.freeze=['encoder.*']", "encoder."), ("method.share=['encoder.*']", "projector.")],
)
def test_only_layers_that_are_exchanged_are_measured(partial, absent):
    rounds = Rounds(*NAME, partial)
    _, kept = rounds.train(0)
    update, _ = rounds.train(0, 3, kept)
    assert rounds.refused(update) is None
    assert update["parts"]["euc"]
    assert not any(name.startswith(absent) for name in update["parts"]["euc"])


def test_a_resumed_run_ends_alike(tmp_path):
    straight = run_tiny(tmp_path / "straight", *NAME, "train.rounds=5")
    run_tiny(tmp_path / "cut", *NAME, "train.rounds=3")
    resumed = run_tiny(tmp_path / "cut", *NAME, "train.rounds=5", resume=True)
    assert same(final_models(resumed), final_models(straight))


@pytest.mark.parametrize(
    ("piece", "reason"),
    [
        ([], "its slice of 'euc' is [], not a table of names"),
        ({"y": [1.0, 4]}, "its slice of 'euc' holds 'y', which was not declared"),
        ({"x": [1.0, 5]}, "its slice of 'euc' says that 'x' has 5 values; it has 4"),
        ({"x": 1.0}, "'x' in its slice of 'euc' is 1.0, not a list of 2"),
        (
            {"x": [float("nan"), 4]},
            "entry 0 of 'x' in its slice of 'euc' is nan, not a float from 0 to 1e+30",
        ),
        (
            {"x": [-1.0, 4]},
            "entry 0 of 'x' in its slice of 'euc' is -1.0, not a float from 0 to 1e+30",
        ),
    ],
)
def test_wrong_slices_are_refused(piece, reason):
    def refused(piece):
        return METHOD.refuse_update(
            {"weights": {"x": torch.zeros(2, 2)}, "losses": {}, "parts": {"euc": piece}}, setting()
        )

    assert refused({"x": [1.0, 4]}) is None
    assert refused({}) is None
    assert refused(None) is None
    assert refused(piece) == reason


def test_bad_options_are_sentences():
    with pytest.raises(UserError, match=r"options\.euc\.interval is 1"):
        EUC(interval=1)
