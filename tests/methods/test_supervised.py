import pytest

from atoll.methods.registry import METHODS
from tests.harness import run_tiny, tiny


def test_fedquad_without_beta_is_supervised_fedavg(tmp_path):
    plain = run_tiny(tmp_path / "plain", "method.name=fed_sl")
    quad = run_tiny(tmp_path / "quad", "method.name=fedquad", "options.fedquad.beta=0.0")
    assert plain.encoder_path.read_bytes() == quad.encoder_path.read_bytes()
    other = run_tiny(tmp_path / "other", "method.name=fedquad")
    assert plain.encoder_path.read_bytes() != other.encoder_path.read_bytes()


@pytest.mark.parametrize(
    "name", ["dec_sl", "dec_slrep", "fed_sl", "fedquad", "moon", "quadruplet", "supcon", "triplet"]
)
def test_supervised_methods_say_that_they_need_labels(name):
    assert METHODS[name].needs_labels
    assert METHODS[name].family == "Supervised methods"


def test_dec_slrep_trains_as_dec_sl_does():
    assert tiny("method.name=dec_sl").composed.objective == tiny("method.name=dec_slrep").composed.objective


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_the_centralised_counterpart_resumes_with_its_optimiser(optimizer, tmp_path):
    settings = (
        "method.name=fed_sl",
        "partition.kind=centralised",
        "partition.clients=1",
        "train.keep_optimizer=true",
        f"train.optimizer={optimizer}",
        "train.lr=0.01",
        "train.rounds=4",
    )
    straight = run_tiny(tmp_path / "straight", *settings)
    run_tiny(tmp_path / "resumed", *settings, "train.rounds=2")
    resumed = run_tiny(tmp_path / "resumed", *settings, resume=True)
    assert straight.encoder_path.read_bytes() == resumed.encoder_path.read_bytes()
    # The state matters: an optimiser that is rebuilt every round ends elsewhere.
    rebuilt = run_tiny(tmp_path / "rebuilt", *settings, "train.keep_optimizer=false")
    assert straight.encoder_path.read_bytes() != rebuilt.encoder_path.read_bytes()
