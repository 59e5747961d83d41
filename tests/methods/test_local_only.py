import pytest

from atoll.core.errors import UserError
from tests.harness import run_tiny, tiny
from tests.rounds import Rounds
from tests.steps import federation
from tests.trees import same


def test_no_weights_pass_after_the_first(tmp_path):
    run = run_tiny(tmp_path / "run", "method.name=local_only", "train.rounds=3")
    down = [line["bytes_down"] for line in run.metrics[1:]]
    up = [line["bytes_up"] for line in run.metrics[1:]]
    assert down[0] > 100_000 > 1000 > down[1] == down[2]
    assert max(up) < 1000
    assert len(list(run.folder.glob("encoder-client-*.safetensors"))) == 4


def test_a_client_goes_on_from_its_own_networks():
    rounds = Rounds("method.name=local_only")
    starts = [rounds.start(client) for client in (0, 1)]
    assert same(starts[0], starts[1])
    update, kept = rounds.train(0)
    assert update["weights"] == {}
    assert same(rounds.start(0, 2, kept), kept["parts"]["local_only"])


def test_it_is_the_centralised_method_on_the_clients_own_samples(tmp_path):
    """One client that is all of a federation learns the same alone as under FedAvg."""
    alone = run_tiny(tmp_path / "alone", "method.name=local_only", "partition.kind=centralised")
    fedavg = run_tiny(tmp_path / "fedavg", "method.name=fed_simclr", "partition.kind=centralised")
    assert alone.encoder_path.read_bytes() == fedavg.encoder_path.read_bytes()


def test_it_is_the_counterpart_of_any_method():
    method = tiny("method.name=ssd", "method.merge=local_only").composed
    assert "the weights of all trained networks" not in method.egress


def test_with_nothing_to_fold_other_aggregations_are_refused():
    with pytest.raises(
        UserError, match=r"'featarc' would have none to fold; set method\.aggregation = 'fedavg'"
    ):
        federation("method.name=featarc", "method.merge=local_only")
    federation("method.name=featarc", "method.merge=local_only", "method.aggregation=fedavg")


def test_with_nothing_to_fold_server_steps_are_refused():
    with pytest.raises(
        UserError, match=r"'fedadam' would have no step to take; set method\.server = 'direct'"
    ):
        federation("method.name=local_only", "method.server=fedadam")
