"""Promise 4 in a round: a server refuses, counts and records its clients' updates."""

import json
import math
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import nn

from atoll.components.base import VIEWS, Objective, Term
from atoll.core.errors import UserError
from atoll.core.tree import clone, num_bytes
from atoll.engines.federation import Federation
from atoll.engines.jobs import Result
from atoll.engines.server import Record, TooFewUpdatesError
from tests.harness import run_tiny, tiny
from tests.rounds import Fixed, Rounds
from tests.trees import same


@pytest.fixture(scope="module")
def trained():
    """A server after round 1, and good updates of round 2."""
    rounds = Rounds("method.name=l_dawa")
    for round in (1, 2):
        updates = {client: rounds.train(client, round)[0] for client in range(4)}
        if round == 1:
            record = rounds.server.run_round(Fixed(updates))
            assert record.clients == 4
    return rounds.server.checkpoint(), updates


def server_of(trained):
    server = Rounds("method.name=l_dawa").server
    server.restore(clone(trained[0]))
    return server


def scaled(update, factor):
    floats = {n: t * factor if t.is_floating_point() else t for n, t in update["weights"].items()}
    return {**update, "weights": floats}


def test_a_refused_update_is_named_and_the_round_goes_on(trained):
    """A thousand times too large: it is as if the client had not been there."""
    _, good = trained
    with_it, without_it = server_of(trained), server_of(trained)
    record = with_it.run_round(Fixed({**good, 2: scaled(good[2], 1000.0)}))
    assert list(record.refused) == ["2"]
    assert "beyond the bound of" in record.refused["2"]
    assert record.clients == 3
    assert json.loads(json.dumps(record.to_dict()))["refused"] == record.refused
    gone = without_it.run_round(Fixed({**good, 2: "its machine is off"}))
    assert gone.lost == {"2": "its machine is off"}
    assert same(with_it.checkpoint()["state"], without_it.checkpoint()["state"])
    assert with_it.valid == {0: 2, 1: 2, 2: 1, 3: 2}
    assert len(with_it.checkpoint()["norms"]) == 7


def test_too_few_accepted_updates_are_an_error_and_change_nothing(trained):
    _, good = trained
    server = server_of(trained)
    before = clone(server.checkpoint())
    bad = {**good, 0: scaled(good[0], math.nan), 1: "its machine is off", 3: {**good[3], "weights": {}}}
    with pytest.raises(TooFewUpdatesError) as error:
        server.run_round(Fixed(bad))
    sentence = str(error.value)
    assert sentence.startswith(
        "round 2 failed: 1 of 4 updates were usable and train.min_accepted requires 50%; "
    )
    assert "client 0: 'encoder." in sentence
    assert "client 1: its machine is off" in sentence
    assert sentence.endswith(
        "; lower train.lr if training diverges, or raise a bound that is too tight, or correct a component that "
        "does not send what it declares, or resume when the lost clients are back, or lower train.min_accepted to "
        "continue with fewer"
    )
    assert "\n" not in sentence
    assert same(server.checkpoint(), before)
    # The same server plays the round again, as if nothing had been.
    fresh = server_of(trained)
    fresh.run_round(Fixed(good))
    server.run_round(Fixed(good))
    assert same(server.checkpoint(), fresh.checkpoint())


@pytest.mark.parametrize(
    ("usable", "said"),
    [
        ((), "clients 0, 1, 2 and 1 more: off; resume when the lost clients are back"),
        (
            (0,),
            "clients 1, 2, 3: off; resume when the lost clients are back, or lower train.min_accepted to continue "
            "with fewer",
        ),
    ],
)
def test_a_failed_round_names_each_reason_once_and_what_helps_against_it(trained, usable, said):
    _, good = trained
    updates = {client: update if client in usable else "off" for client, update in good.items()}
    with pytest.raises(TooFewUpdatesError) as error:
        server_of(trained).run_round(Fixed(updates))
    required = f"{len(usable)} of 4 updates were usable and train.min_accepted requires 50%"
    assert str(error.value) == f"round 2 failed: {required}; {said}"


def test_a_failed_round_names_at_most_three_reasons(trained):
    with pytest.raises(
        TooFewUpdatesError, match="client 0: off 0; client 1: off 1; client 2: off 2 …; resume"
    ):
        server_of(trained).run_round(Fixed({client: f"off {client}" for client in trained[1]}))


@pytest.mark.parametrize(("number", "most"), [(4, True), (3, True), (2, False)])
def test_a_model_that_an_earlier_update_spoiled_is_named_as_a_cause(trained, number, most):
    """As weights that one client multiplied by 30 in the first round: all honest clients then move far."""
    _, good = trained
    far = {client: scaled(good[client], 1000.0) if client < number else "off" for client in good}
    with pytest.raises(TooFewUpdatesError) as error:
        server_of(trained).run_round(Fixed(far))
    assert ("suspect an update that an earlier round accepted and that spoiled" in str(error.value)) == most
    assert "lower train.min_accepted" not in str(error.value)  # no update is left to continue with


def test_jobs_are_in_the_order_of_ids_and_name_each_clients_valid_state(trained, monkeypatch):
    server = server_of(trained)
    server.valid = {3: 1, 1: 4}
    monkeypatch.setattr(server, "cohort", lambda round: [3, 0, 1])
    messages = [job.message for job in server.jobs(5)]
    assert [(m["client"], m["kept"], m["round"]) for m in messages] == [(0, 0, 5), (1, 4, 5), (3, 1, 5)]


def test_cohorts_and_random_streams_are_those_of_the_seed_and_the_round():
    def drawn(seed):
        server = Rounds("method.name=fed_simclr", "train.participation=0.5", f"seed={seed}").server
        return [(tuple(server.cohort(round)), server.seed(round)) for round in range(1, 9)]

    first, other = drawn(0), drawn(1)
    assert first == drawn(0)
    assert [cohort for cohort, _ in first] != [cohort for cohort, _ in other]
    assert len({cohort for cohort, _ in first}) > 1
    assert len({seed for _, seed in first + other}) == 16


@dataclass(frozen=True)
class Draws(Term):
    """Draws at the server, without a generator of its own."""

    name: ClassVar[str] = "draws"
    source: ClassVar[str] = "a test"

    def constants(self, setting, prerequisites):
        return torch.rand(3)

    def init(self, setting):
        return torch.rand(3)

    def loss(self, context, batch, passes):
        return torch.zeros(())


def test_what_the_users_code_draws_at_the_server_is_that_of_the_seed():
    found = []
    for seed in (0, 0, 1):
        torch.rand(1)  # moves PyTorch's own stream
        server = Rounds("method.name=fed_simclr", f"method.terms=['{__name__}:Draws']", f"seed={seed}").server
        found.append((server.constants["draws"], server.state["parts"]["draws"]))
    assert same(found[0], found[1])
    assert not any(torch.equal(one, other) for one, other in zip(found[0], found[2], strict=True))


@pytest.mark.parametrize("change", [{"seed": 1}, {"valid": {"4": 1}}])
def test_a_checkpoint_of_another_seed_or_of_more_clients_is_refused(trained, change):
    with pytest.raises(UserError, match="belongs to another run"):
        Rounds("method.name=l_dawa").server.restore({**clone(trained[0]), **change})


def test_half_is_not_too_few(trained):
    _, good = trained
    server = server_of(trained)
    assert server.run_round(Fixed({**good, 0: "off", 1: "off"})).clients == 2
    server = server_of(trained)
    server.recipe = replace(server.recipe, train=replace(server.recipe.train, min_accepted=0.75))
    with pytest.raises(TooFewUpdatesError, match="requires 75%"):
        server.run_round(Fixed({**good, 0: "off", 1: "off"}))


@pytest.mark.parametrize("share", [0.5, 0.8])  # of five, of which four are usable
def test_a_round_with_too_few_updates_for_its_aggregation_says_why_they_are_too_few(share):
    """Krum with f = 1 needs five; it must not answer for a client that was refused or lost."""
    rounds = Rounds("method.aggregation=multi_krum", "partition.clients=5", f"train.min_accepted={share}")
    server, updates = rounds.server, {client: rounds.train(client)[0] for client in range(5)}
    with pytest.raises(TooFewUpdatesError) as error:
        server.run_round(Fixed({**updates, 2: scaled(updates[2], math.nan), 3: updates[3]}))
    sentence = str(error.value)
    assert sentence.startswith(
        "round 1 failed: 4 of 5 updates were usable and 'multi_krum' requires 5; client 2: 'encoder."
    )
    assert sentence.endswith(
        "does not send what it declares, or start again with other options.multi_krum, which require fewer"
    )
    assert server.run_round(Fixed(updates)).clients == 5


def test_an_unknown_key_is_refused(trained):
    _, good = trained
    server = server_of(trained)
    record = server.run_round(Fixed({**good, 0: {**good[0], "measure": "mine"}}))
    assert record.refused == {"0": "it contains 'measure', which was not declared (1 such keys)"}


def test_the_mean_angular_divergence_is_in_the_metrics(tmp_path):
    """μ_δ, for every method; that of a run whose clients do not train is 1."""
    lines = run_tiny(tmp_path / "a", "method.name=fed_simclr").metrics[1:]
    assert all(0.5 < line["angular_divergence"] < 1 for line in lines)
    still = run_tiny(tmp_path / "b", "method.name=fed_simclr", "train.epochs=0").metrics[1:]
    assert all(line["angular_divergence"] == 1 for line in still)


def test_the_angular_divergence_is_the_mean_over_the_accepted_clients():
    """The cosine of all weights as one vector, for each client; those refused or lost do not count."""
    rounds = Rounds("method.name=fed_simclr")
    sent = clone(rounds.server.state["models"]["global"])
    good = {client: rounds.train(client)[0] for client in range(4)}
    away = {name: -w if name.endswith("weight") else w for name, w in good[0]["weights"].items()}
    good[0] = {**good[0], "weights": away}  # so that the mean is not the median
    bad = {**good, 1: "its machine is off", 2: scaled(good[2], math.nan)}

    def cosine(weights):
        floats = [name for name, weight in sent.items() if weight.is_floating_point()]
        w, g = (torch.cat([model[name].flatten() for name in floats]).tolist() for model in (weights, sent))
        inner = math.fsum(a * b for a, b in zip(w, g, strict=True))
        return inner / math.sqrt(math.fsum(a * a for a in w) * math.fsum(b * b for b in g))

    for updates, count in ((good, (0, 1, 2, 3)), (bad, (0, 3))):
        record = Rounds("method.name=fed_simclr").server.run_round(Fixed(updates))
        assert record.clients == len(count)
        cosines = [cosine(good[client]["weights"]) for client in count]
        assert record.angular_divergence == pytest.approx(sum(cosines) / len(cosines), rel=1e-5)


def test_a_record_is_a_line_of_metrics_without_what_did_not_happen():
    usual = {
        "round": 3, "loss": 1.5, "losses": {"loss": 1.5, "moco": 0.5}, "clients": 2, "bytes_down": 7, "bytes_up": 5,
        "seconds": 1.235, "angular_divergence": 0.25,
    }  # fmt: skip
    record = Record(3, 2, 7, 5, 1.23456, 0.25, {"loss": 1.5, "moco": 0.5})
    assert record.to_dict() == usual
    record.idle, record.refused, record.lost = True, {"1": "too large"}, {"2": "off"}
    record.privacy, record.measures, record.layers = {"epsilon": 1.0}, {"norm": 2.0}, {"conv1": 0.5}
    assert record.to_dict() == {
        **usual, "idle": True, "refused": {"1": "too large"}, "lost": {"2": "off"}, "privacy": {"epsilon": 1.0},
        "measures": {"norm": 2.0}, "layers": {"conv1": 0.5},
    }  # fmt: skip


@dataclass
class Given:
    """An executor with the results that a test gives."""

    results: list[Result]

    def run(self, jobs, progress=None):
        yield from self.results


def test_losses_are_means_over_the_clients_that_report_them(trained):
    """A client that took no step reports none."""
    _, good = trained
    losses = [{"loss": 2.0, "simclr": 1.0}, {}, {"loss": 5.0, "simclr": 2.5}, {"loss": 11.0, "simclr": 4.0}]
    updates = {client: {**good[client], "losses": losses[client]} for client in range(4)}
    record = server_of(trained).run_round(Fixed(updates))
    assert record.losses == pytest.approx({"loss": 6.0, "simclr": 2.5})


def test_bytes_are_those_of_what_was_sent_and_of_what_arrived_also_if_it_was_refused():
    """Constants go to each client once, also over a resumption."""
    settings = ("method.name=ssd", "options.dsr.basis=random")
    rounds = Rounds(*settings)
    updates = {client: rounds.train(client)[0] for client in range(4)}
    updates[1] = scaled(updates[1], math.nan)
    up = sum(num_bytes(updates[client]) for client in (0, 1, 2))
    once = num_bytes(rounds.server.constants)
    assert once > 0
    for sent, number in (({0, 1, 2}, 3), ({0, 1, 2, 3}, 1), ({0, 1, 2, 3}, 0)):
        server = rounds.server
        down = sum(num_bytes(job.message) for job in server.jobs(server.round + 1) if job.client in sent)
        lost = Result(3, lost="off", sent=3 in sent)
        results = [*(Result(client, updates[client]) for client in range(3)), lost]
        record = server.run_round(Given(results))
        assert (record.bytes_up, record.bytes_down) == (up, down + number * once)
        rounds.server = Rounds(*settings).server
        rounds.server.restore(clone(server.checkpoint()))


def test_a_client_whose_state_is_lost_counts_as_new_and_another_lost_client_does_not(trained):
    _, good = trained
    server = server_of(trained)
    assert server.valid == dict.fromkeys(range(4), 1)
    results = [
        Result(0, good[0]), Result(1, lost="its disk is broken", reset=True), Result(2, good[2]),
        Result(3, lost="off"),
    ]  # fmt: skip
    server.run_round(Given(results))
    assert server.valid == {0: 2, 2: 2, 3: 1}
    resumed = Rounds("method.name=l_dawa").server
    resumed.restore(clone(server.checkpoint()))
    for one in (server, resumed):
        assert [job.message["kept"] for job in one.jobs(3)] == [2, 0, 2, 1]


def test_a_whole_run_tells_the_door_which_names_are_running_statistics(tmp_path):
    names = Federation(tiny()).setting.running_statistics
    assert "encoder.bn1.running_var" in names
    assert "encoder.bn1.weight" not in names
    run = run_tiny(tmp_path / "run", "train.first_norm=30", "train.lr=0.001")
    assert not any("refused" in line for line in run.metrics)


@pytest.mark.parametrize("resumed", [False, True])
def test_a_clients_control_variate_is_bounded_like_its_weights(resumed):
    rounds = Rounds("method.name=scaffold")
    updates = {client: rounds.train(client)[0] for client in range(4)}
    assert rounds.server.run_round(Fixed(updates)).clients == 4
    if resumed:
        checkpoint = clone(rounds.server.checkpoint())
        rounds.server = Rounds("method.name=scaffold").server
        rounds.server.restore(clone(checkpoint))
        assert checkpoint["accepted"]
        assert same(rounds.server.checkpoint(), checkpoint)
    again = {client: rounds.train(client, 2)[0] for client in range(4)}
    slices = {name: 1e4 * value for name, value in again[1]["parts"]["scaffold"].items()}
    record = rounds.server.run_round(Fixed({**again, 1: {**again[1], "parts": {"scaffold": slices}}}))
    assert list(record.refused) == ["1"]
    assert record.refused["1"].startswith("the norm of its slice of 'scaffold' is")


def test_a_reason_in_the_metrics_is_one_clean_line(trained, monkeypatch):
    _, good = trained
    server = server_of(trained)
    monkeypatch.setattr(server.checks, "examine", lambda *_: "bad\n\x1b[2J" + "x" * 10**6)
    with pytest.raises(TooFewUpdatesError) as error:
        server.run_round(Fixed(good))
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 5000


@dataclass(frozen=True)
class CutOff(Objective):
    """An author's mistake: the number of the loss instead of the loss."""

    name: ClassVar[str] = "cut_off"
    cut: bool = True

    def forwards(self):
        return VIEWS

    def loss(self, context, batch, passes):
        z1, z2 = (passes[view].z for view in VIEWS)
        loss = (z1 - z2).square().mean()
        return torch.tensor(loss.item()) if self.cut else loss


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (("method.name=fed_simclr", f"method.objective={__name__}:CutOff"), True),
        (
            ("method.name=fed_simclr", f"method.objective={__name__}:CutOff", "options.cut_off.cut=false"),
            False,
        ),
        (("method.name=local_only",), False),  # no weight leaves a client
        (("method.name=dcco",), False),  # the first round gathers statistics
    ],
)
def test_a_training_that_changes_no_weight_is_said(settings, expected, tmp_path, recwarn):
    run_tiny(tmp_path / "run", *settings)
    said = [one for one in recwarn.list if "no weight that leaves them changed" in str(one.message)]
    assert bool(said) == expected


class Detached(nn.Sequential):
    """An author's mistake: an encoder that computes without gradients."""

    output_dim = 64

    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 64))

    @torch.no_grad()
    def forward(self, x):
        return super().forward(x)


def test_an_encoder_that_does_not_learn_is_said(tmp_path):
    own = (f"model.encoder={__name__}:Detached", "model.width=", "model.stem=", "data.channels=1")
    with pytest.warns(UserWarning, match=r"no weight of the encoder changed.*no_grad"):
        run_tiny(tmp_path / "run", "method.name=fed_simclr", *own, "views.mean=[0.5]", "views.std=[0.5]")


def test_a_private_round_without_clients_is_not_idle(monkeypatch):
    """Its noise moves the model."""
    private = ("method.name=fed_simclr", "method.aggregation=private_fedavg", "train.bn_buffers=leave")
    rounds = Rounds(*private)
    monkeypatch.setattr(type(rounds.server), "cohort", lambda server, round: [])
    record = rounds.server.run_round(Fixed({}))
    assert not record.idle
