import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll import load_encoder
from atoll.core.errors import UserError
from atoll.core.tree import same
from atoll.methods.lagoon import Relay
from tests.folds import setting
from tests.harness import final_models, run_tiny

LAGOON = "method.name=atoll.methods.lagoon:METHOD"


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 5))
def test_a_sweep_visits_every_client_once(clients, groups, sweep):
    if groups > clients:
        groups = clients
    relay, where = Relay(groups=groups), setting(clients)
    rounds = [relay.cohort(where, groups * sweep + turn) for turn in range(1, groups + 1)]
    assert sorted(client for cohort in rounds for client in cohort) == list(range(clients))
    assert max(map(len, rounds)) - min(map(len, rounds)) <= 1


def test_sweeps_differ():
    relay, where = Relay(groups=2), setting(10)
    assert len({tuple(relay.cohort(where, 2 * sweep + 1)) for sweep in range(10)}) > 5


def test_a_sweep_of_one_group_is_fedavg(tmp_path):
    settings = ("options.relay.groups=1", "options.relay.sweeps=1")
    relay = run_tiny(tmp_path / "relay", LAGOON, *settings)
    plain = run_tiny(tmp_path / "plain", "method.name=fed_align_uniform")
    models = final_models(relay)
    assert same(models["global"], final_models(plain)["global"])
    assert same(models["kept"], models["global"])
    assert (relay.folder / "encoder.safetensors").is_file()


def test_the_kept_model_is_the_mean_of_the_rounds(tmp_path):
    """α = 1/r up to round A·G = 3, and 1/3 after it."""
    settings = (LAGOON, "options.relay.groups=2", "options.relay.sweeps=1.5")
    run = run_tiny(tmp_path / "run", *settings, "train.rounds=4")
    assert final_models(run).keys() == {"global", "kept"}
    mean: dict[str, torch.Tensor] = {}
    for round in range(1, 5):
        trained = run_tiny(tmp_path / str(round), *settings, f"train.rounds={round}")
        weights = {
            name: w.double() for name, w in final_models(trained)["global"].items() if w.is_floating_point()
        }
        share = max(1 / round, 1 / 3)
        mean = {name: (1 - share) * mean.get(name, 0.0) + share * w for name, w in weights.items()}
    kept = final_models(run)["kept"]
    assert all(
        torch.allclose(kept[name].double(), value, rtol=1e-5, atol=1e-6) for name, value in mean.items()
    )


def test_the_run_ends_with_the_kept_model(tmp_path):
    run = run_tiny(tmp_path / "run", LAGOON, "options.relay.groups=2", "options.relay.sweeps=2")
    encoder, kept = load_encoder(run.encoder_path).state_dict(), final_models(run)["kept"]
    assert all(torch.equal(weight, kept[f"encoder.{name}"]) for name, weight in encoder.items())


def test_more_groups_than_clients_are_refused(tmp_path):
    with pytest.raises(UserError, match="5 groups for 4 clients"):
        run_tiny(tmp_path / "run", LAGOON, "options.relay.groups=5")
