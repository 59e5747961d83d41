import json
from dataclasses import replace

import pytest

from atoll.core.errors import UserError
from atoll.evaluation import EvaluationOptions
from atoll.evaluation.protocols import (
    FINE_TUNES,
    PROBES,
    FineTuneProtocol,
    ProbeProtocol,
    find_probe,
    shortened,
)


@pytest.mark.parametrize(
    ("name", "optimizer", "lr", "weight_decay", "epochs", "batch_size"),
    [
        ("ssd", "adam", 3e-3, 0, 200, 512),
        ("l-dawa", "sgd", 0.01, 0, 100, 128),
        ("dec-ssl", "adam", 1e-3, 1e-6, 50, 256),
        ("dec-ssl-mae", "adamw", 3e-4, 0.05, 50, 256),
        ("fedca", "adam", 1e-3, 0, 100, 128),
        ("easyfl", "adam", 3e-3, 0, 200, 2048),
        ("orchestra", "sgd", 30, 0, 50, 256),
    ],
)
def test_constants_are_the_papers(
    name: str, optimizer: str, lr: float, weight_decay: float, epochs: int, batch_size: int
) -> None:
    protocol = PROBES[name]
    assert (protocol.optimizer, protocol.lr, protocol.weight_decay) == (optimizer, lr, weight_decay)
    assert (protocol.epochs, protocol.batch_size) == (epochs, batch_size)


def test_l_dawas_rate_falls_twice_and_orchestras_along_a_cosine() -> None:
    dawa, orchestra = PROBES["l-dawa"], PROBES["orchestra"]
    assert (dawa.momentum, dawa.nesterov, orchestra.momentum, orchestra.nesterov) == (0.9, True, 0.9, False)
    assert (dawa.schedule, dawa.milestones, dawa.decay) == ("step", (60, 80), 0.1)
    assert orchestra.schedule == "cosine"
    assert (dawa.maps, dawa.normalise) == (True, False)
    assert all(probe.schedule == "constant" for probe in PROBES.values() if probe.optimizer != "sgd")


def test_a_shortened_protocol_keeps_whole_rounds_and_moves_its_epochs() -> None:
    federated = FINE_TUNES["finetune-fedca-federated-10"]
    assert (federated.epochs, federated.local_epochs, federated.labelled) == (100, 5, "10 % of the labels")
    for most, local, epochs in ((12, 5, 10), (5, 5, 5), (3, 3, 3)):
        short = shortened(federated, most)
        assert (short.local_epochs, short.epochs) == (local, epochs)
        assert short.name == f"finetune-fedca-federated-10, at most {most} epochs"
    few = FINE_TUNES["finetune-100-labels"]
    assert (few.labelled, few.epochs, few.every) == ("100 labels", 40, 10)
    assert [shortened(few, most).every for most in (39, 8, 1)] == [10, 2, 1]
    assert [shortened(PROBES["l-dawa"], most).milestones for most in (50, 1)] == [(30, 40), (1, 1)]
    assert shortened(few, 40) is shortened(few, None) is few


def test_the_default_is_ssds_last_epoch_on_plain_features() -> None:
    protocol = EvaluationOptions().probe_protocol()
    assert protocol is PROBES["ssd"]
    assert (protocol.select, protocol.standardise, protocol.maps) == ("last", False, False)
    assert not protocol.differs


def test_a_changed_protocol_says_so() -> None:
    changed = find_probe("ssd", lr=0.1, epochs=200, batch_size=None)
    assert (changed.lr, changed.epochs, changed.batch_size) == (0.1, 200, 512)
    assert changed.name == "ssd, changed: lr"  # 200 epochs are the protocol's own
    assert find_probe("ssd", lr=3e-3) is PROBES["ssd"]


def test_constants_are_flat_json() -> None:
    for protocol in [*PROBES.values(), *FINE_TUNES.values()]:
        constants = protocol.constants()
        assert json.loads(json.dumps(constants)) == constants
        assert all(isinstance(value, bool | int | float | str) for value in constants.values())
    assert PROBES["l-dawa"].constants()["milestones"] == "60 80"


def test_fine_tuning_is_ssds_on_one_and_ten_per_cent() -> None:
    assert {name: FINE_TUNES[name].fraction for name in ("finetune-1", "finetune-10")} == {
        "finetune-1": 0.01,
        "finetune-10": 0.1,
    }
    one = FINE_TUNES["finetune-1"]
    assert (one.encoder_lr, one.head_lr, one.momentum) == (1e-3, 0.3, 0.9)
    assert (one.epochs, one.batch_size, one.every, one.select) == (200, 128, 50, "last")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"probe": "sdd"}, "did you mean 'ssd'"),
        ({"probe_select": "bset"}, "did you mean 'best'"),
        ({"probe_lr": 0.0}, "lr is 0.0; it must be above 0"),
        ({"probe_epochs": -1}, "epochs is -1"),
        ({"every": -1}, "evaluation.every is -1"),
        ({"knn_k": 0}, "evaluation.knn_k is 0"),
        ({"knn_temperature": 0.0}, "evaluation.knn_temperature"),
        ({"batch_size": 0}, "evaluation.batch_size"),
        ({"geometry_samples": 1}, "evaluation.geometry_samples"),
        ({"at_end": ("knn", "prob")}, "evaluation.at_end names 'prob'; did you mean 'probe'"),
        ({"during": ("finetune-2",)}, "evaluation.during names 'finetune-2'; did you mean 'finetune-1'"),
    ],
)
def test_a_recipes_mistake_gets_a_sentence(change: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        EvaluationOptions(**change)


def test_a_recipes_lists_become_tuples() -> None:
    options = EvaluationOptions(during=["knn"], at_end=["geometry"])
    assert (options.during, options.at_end) == (("knn",), ("geometry",))
    assert hash(options) == hash(EvaluationOptions(during=("knn",), at_end=("geometry",)))


def test_protocols_that_cannot_be_trained_are_refused() -> None:
    with pytest.raises(UserError, match=r"probe\.optimizer is 'adamm'; did you mean 'adam"):
        ProbeProtocol("mine", "adamm", lr=1.0, epochs=1, batch_size=1)
    with pytest.raises(UserError, match=r"finetune\.fraction is 0\.0; it must be above 0 and at most 1"):
        FineTuneProtocol("mine", 0.0)
    with pytest.raises(UserError, match=r"finetune\.batch_size is 1; it must be at least 2"):
        FineTuneProtocol("mine", 0.5, batch_size=1)


def test_fedcas_fine_tuning_is_an_mlp_under_adam() -> None:
    for percent in (1, 10, 100):
        one = FINE_TUNES[f"finetune-fedca-{percent}"]
        assert one.fraction == percent / 100
        assert (one.optimizer, one.encoder_lr, one.head_lr, one.epochs) == ("adam", 1e-3, 1e-3, 100)
        assert len(one.hidden) == 1


def test_a_probe_with_few_labels_is_its_papers_probe() -> None:
    for name in ("l-dawa", "dec-ssl"):
        for percent in (1, 10):
            few = PROBES[f"{name}-{percent}"]
            assert few.fraction == percent / 100
            assert replace(few, name=name, fraction=1.0, differs=PROBES[name].differs) == PROBES[name]


def test_the_section_chooses_the_epoch_of_fine_tuning() -> None:
    chosen = EvaluationOptions(finetune_select="best").fine_tuning(FINE_TUNES["finetune-1"])
    assert chosen == replace(FINE_TUNES["finetune-1"], select="best")
    with pytest.raises(UserError, match=r"evaluation\.finetune_select is 'bset'; did you mean 'best'"):
        EvaluationOptions(finetune_select="bset")
    with pytest.raises(UserError, match=r"probe\.fraction is 0\.0; it must be above 0 and at most 1"):
        replace(PROBES["ssd"], fraction=0.0)


def test_milestones_move_with_the_epochs_whichever_option_sets_them() -> None:
    assert find_probe("l-dawa", epochs=20).milestones == (12, 16)
    assert find_probe("l-dawa", lr=1.0).milestones == PROBES["l-dawa"].milestones
