import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import UserError
from atoll.core.tree import clone
from atoll.engines.server import TooFewUpdatesError
from atoll.methods.fedmar import MAR
from atoll.methods.lagoon import Relay
from tests.folds import setting
from tests.harness import final_models, run_tiny
from tests.methods.test_fedmar import VIT
from tests.rounds import Fixed, Rounds
from tests.steps import federation
from tests.trees import same

LAGOON = "method.name=lagoon"


@given(st.integers(1, 12), st.integers(0, 12), st.integers(0, 5))
def test_a_sweep_visits_every_client_once(clients, groups, sweep):
    relay, where = Relay(groups=groups), setting(clients)
    groups = min(groups or clients, clients)
    rounds = [relay.cohort(where, groups * sweep + turn) for turn in range(1, groups + 1)]
    assert sorted(client for cohort in rounds for client in cohort) == list(range(clients))
    assert max(map(len, rounds)) - min(map(len, rounds)) <= 1
    assert relay.cohort_size(where) == min(map(len, rounds))


def test_sweeps_differ():
    relay, where = Relay(groups=2), setting(10)
    assert len({tuple(relay.cohort(where, 2 * sweep + 1)) for sweep in range(10)}) > 5


def test_one_group_is_fedavg(tmp_path):
    relay = run_tiny(tmp_path / "relay", LAGOON, "options.relay.groups=1")
    plain = run_tiny(tmp_path / "plain", "method.name=fed_align_uniform")
    assert same(final_models(relay), final_models(plain))


def test_a_sweep_has_the_images_and_bytes_of_a_round_of_fedavg(tmp_path):
    """And G times the steps in a row: a client starts from what the group before it left."""
    relay = run_tiny(tmp_path / "relay", LAGOON, "options.relay.groups=2", "train.rounds=4")
    plain = run_tiny(tmp_path / "plain", "method.name=fed_align_uniform", "train.rounds=2")
    for name in ("bytes_up", "bytes_down", "clients"):
        assert sum(line.get(name, 0) for line in relay.metrics) == sum(
            line.get(name, 0) for line in plain.metrics
        )
    assert not same(final_models(relay), final_models(plain))


TURNS = ("method.aggregation=relay", "options.relay.groups=2")


@pytest.mark.parametrize("method", ["fedema", "euc", "dcco", "fedsc"])
def test_what_relates_consecutive_rounds_is_refused(method):
    with pytest.raises(
        UserError, match=f"'{method}' relates a client's round .* set method.aggregation = 'fedavg'"
    ):
        federation(f"method.name={method}", *TURNS)
    federation(f"method.name={method}", TURNS[0], "options.relay.groups=1")


@pytest.mark.parametrize("method", ["dcco", "fedsc"])
def test_statistics_of_each_update_go_with_turns(method):
    federation(f"method.name={method}", *TURNS, f"options.{method}.gather=updates")


def test_fed_mar_expects_a_clients_round_of_each_sweep():
    setting = federation("method.name=fed_mar", *VIT, *TURNS, "train.rounds=10").setting
    assert MAR().gamma(5, setting) == pytest.approx(MAR().last_weight)  # Ω = 10 rounds · 1/2
    assert MAR().gamma(4, setting) > MAR().last_weight


def test_a_client_that_is_lost_misses_its_turn_and_a_lost_sweep_stops_the_run():
    rounds = Rounds(LAGOON)
    server, clients = rounds.server, range(rounds.federation.setting.num_clients)
    lost = dict.fromkeys(clients, "its machine is off")

    def turn(answers):
        before = clone(server.state)
        record = server.run_round(Fixed(answers))
        return record, same(server.state, before)

    for number in range(1, len(clients)):
        record, unchanged = turn(lost)
        assert (record.round, record.clients, unchanged) == (number, 0, True)
        assert list(record.lost.values()) == ["its machine is off"]
    (client,) = server.cohort(server.round + 1)
    update, _ = rounds.train(client, server.round + 1)
    record, unchanged = turn({client: update})
    assert (record.clients, unchanged, server.valid) == (1, False, {client: len(clients)})
    for _ in clients[1:]:
        assert turn(lost)[1]
    with pytest.raises(TooFewUpdatesError, match="0 of 1 updates were usable"):
        turn(lost)


@pytest.mark.parametrize("groups", [2, 4])
def test_a_resumed_server_goes_on_counting_lost_turns(groups):
    settings = (LAGOON, f"options.relay.groups={groups}")
    rounds = Rounds(*settings)
    lost = dict.fromkeys(range(rounds.federation.setting.num_clients), "its machine is off")
    for _ in range(groups - 1):
        rounds.server.run_round(Fixed(lost))
    resumed = Rounds(*settings).server
    resumed.restore(rounds.server.checkpoint())
    with pytest.raises(TooFewUpdatesError, match=r"0 of \d updates were usable"):
        resumed.run_round(Fixed(lost))


def test_a_missed_turn_records_nothing_of_the_updates_that_it_drops():
    rounds = Rounds(LAGOON, "options.relay.groups=2", "train.min_accepted=1")
    here, *others = rounds.server.cohort(1)
    update, _ = rounds.train(here, 1)
    record = rounds.server.run_round(Fixed({here: update, **dict.fromkeys(others, "its machine is off")}))
    assert (record.clients, record.losses, record.angular_divergence, record.idle) == (0, {}, None, True)
    assert rounds.server.checkpoint()["norms"] == []
    assert record.bytes_up > 0


def test_a_share_of_the_clients_is_refused(tmp_path):
    with pytest.raises(UserError, match="leave train"):
        run_tiny(tmp_path, LAGOON, "train.participation=0.5")
