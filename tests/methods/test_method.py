from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest

from atoll.aggregation.fedavg import FedAvg
from atoll.aggregation.private import PrivateFedAvg
from atoll.aggregation.secure_sum import SecureSum
from atoll.components.base import Aggregation, Component, Forward, NumberSpec, Objective, Optional, Term
from atoll.core.errors import UserError
from atoll.engines.federation import Federation
from atoll.methods.method import Method
from atoll.objectives import simclr
from atoll.objectives.simclr import SimCLR
from tests.folds import model, setting
from tests.harness import tiny
from tests.steps import federation

pytest.importorskip("dp_accounting", reason="the extra atoll[dp] is not installed")


@dataclass(frozen=True)
class Silent(Term):
    """Sends the client's samples, and says nothing of it."""

    name: ClassVar[str] = "silent"

    def finish(self, context):
        return context.data.num_samples


@dataclass(frozen=True)
class SilentByBirth(Silent):
    """Got it from its parent."""


@dataclass(frozen=True)
class Honest(Silent):
    """Says so."""

    egress: ClassVar[tuple[str, ...]] = ("its number of samples",)


@dataclass(frozen=True)
class Tidy(Silent):
    """Overrides the hook, and says that nothing comes of it."""

    egress: ClassVar[tuple[str, ...]] = ()

    def finish(self, context):
        return None


@dataclass(frozen=True)
class Reporting(PrivateFedAvg):
    """An aggregation that has clients send more."""

    def report(self, context):
        return {"samples": context.data.num_samples}


def refusal(term, aggregation=None):
    method = Method(objective=SimCLR(), terms=(term,), aggregation=aggregation or PrivateFedAvg())
    return method.refuse(setting(bn_buffers="leave"))


@pytest.mark.parametrize("term", [Silent(), SilentByBirth()])
def test_a_part_that_may_send_something_must_say_what_where_only_weights_are_covered(term):
    assert refusal(term) == (
        "'private_fedavg' covers weights only, and 'silent' overrides finish without declaring in egress what it "
        "sends; declare it (egress = () if nothing leaves), or choose another method or aggregation"
    )
    assert "'silent' sends more than that (its number of samples)" in refusal(Honest())
    assert "'private_fedavg' overrides report without" in refusal(Tidy(), Reporting())
    assert refusal(Tidy()) is None
    assert refusal(Silent(weight=0.0)) is None
    assert Method(objective=SimCLR(), terms=(term,)).refuse(setting()) is None


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        (
            "method.objective=atoll.aggregation.fedavg:FedAvg",
            "objective '.*' is a FedAvg, not an atoll Objective",
        ),
        ("method.terms=['atoll.objectives.simclr:SimCLR']", "term '.*' is a SimCLR, not an atoll Term"),
        ("method.merge=atoll.objectives.simclr:SimCLR", "merge '.*' is a SimCLR, not an atoll Merge"),
        ("method.aggregation=atoll.objectives.simclr:SimCLR", "is a SimCLR, not an atoll Aggregation"),
        (
            "method.server=atoll.objectives.simclr:SimCLR",
            "server step '.*' is a SimCLR, not an atoll ServerStep",
        ),
    ],
)
def test_a_component_of_another_axis_is_refused(setting, sentence):
    with pytest.raises(UserError, match=sentence):
        _ = tiny(setting).composed


@pytest.mark.parametrize("terms", [Honest(), "dsr", ("dsr",)])
def test_terms_that_are_no_tuple_of_components_are_refused(terms):
    with pytest.raises(UserError, match=r"give a tuple, as in terms=\(Mine\(\),\)"):
        Method(objective=SimCLR(), terms=terms)


@pytest.mark.parametrize("terms", [(Honest(), Silent(weight=0.5)), (Honest(), Honest())])
def test_two_terms_of_one_name_are_refused(terms):
    """A run had only the last of them."""
    with pytest.raises(UserError, match="two terms of a method have the name 'silent'"):
        Method(objective=SimCLR(), terms=terms)


@pytest.mark.parametrize("declared", [Forward("view1"), ("view1",), "view1"])
def test_forward_passes_that_are_no_tuple_are_refused(monkeypatch, declared):
    monkeypatch.setattr(Honest, "forwards", lambda self: declared)
    assert Method(objective=SimCLR(), terms=(Honest(),)).refuse(setting()) == (
        f"'silent'.forwards() returns {declared!r}; return a tuple, as in (Forward(\"view1\"),)"
    )


@pytest.mark.parametrize("declared", ["samples", ("sample",), None])
def test_statistics_that_no_update_contains_are_refused(monkeypatch, declared):
    """A text held the letters of one, which the server then did not expect."""
    monkeypatch.setattr(Reporting, "statistics", declared)
    assert Method(objective=SimCLR(), aggregation=Reporting()).refuse(setting()) == (
        f"'private_fedavg'.statistics is {declared!r}; it must be a tuple of 'samples', 'batches', 'loss', such as "
        "('samples',)"
    )


@pytest.mark.parametrize("name", ["egress", "keeps"])
@pytest.mark.parametrize("declared", ["a mean", None, (3,)])
def test_descriptions_that_are_no_tuple_of_texts_are_refused(monkeypatch, name, declared):
    """A text was listed letter by letter."""
    monkeypatch.setattr(Honest, name, declared)
    assert Method(objective=SimCLR(), terms=(Honest(),)).refuse(setting()) == (
        f"'silent'.{name} is {declared!r}; it must be a tuple of texts, such as ('the mean embedding',)"
    )


@dataclass(frozen=True)
class Undescribed(Silent):
    """Declares the form of what it sends, and describes nothing."""

    def declares(self, setting):
        return NumberSpec(int, least=0)


@dataclass(frozen=True)
class UndescribedInWords(Undescribed):
    """Says that nothing leaves."""

    egress: ClassVar[tuple[str, ...]] = ()


@dataclass(frozen=True)
class Described(Undescribed):
    """Says so."""

    egress: ClassVar[tuple[str, ...]] = ("its number of samples",)


def test_what_a_part_declares_to_send_must_be_described_in_egress():
    """What leaves a client did not contain it: neither in the command's list nor in the report."""

    def refused(term):
        return Method(objective=SimCLR(), terms=(term,)).refuse(setting())

    assert refused(Undescribed()) == (
        "'silent' declares data that it sends, and its egress does not describe them; add egress, as in "
        "egress: ClassVar[tuple[str, ...]] = ('the mean embedding',)"
    )
    assert "its egress does not describe" in refused(UndescribedInWords())
    assert refused(Described()) is None
    assert refused(Undescribed(weight=0.0)) is None


@pytest.mark.parametrize("declared", [(3,), {"mean": (3,)}, {"mean": Optional(3)}, {1: NumberSpec()}, 3])
def test_a_declaration_that_is_no_spec_is_refused(declared, monkeypatch):
    """The first update that was checked ended in a traceback."""
    monkeypatch.setattr(Described, "declares", lambda self, setting: declared)
    reason = Method(objective=SimCLR(), terms=(Described(),)).refuse(setting())
    assert reason.startswith(f"'silent'.declares returns {declared!r}; return a spec of atoll.components")


def test_an_objective_is_a_method_as_a_class_and_as_an_object(monkeypatch):
    """An object was refused as "a SimCLR, not an atoll Method or Objective"."""
    monkeypatch.setattr(simclr, "MINE", SimCLR(temperature=0.2), raising=False)
    for name, temperature in (("SimCLR", SimCLR().temperature), ("MINE", 0.2)):
        assert (
            tiny(f"method.name=atoll.objectives.simclr:{name}").composed.objective.temperature == temperature
        )


@pytest.mark.parametrize("kind", [Objective, Term, Aggregation])
def test_a_component_without_its_own_method_is_told_which(kind):
    hook, arguments = ("open", 4) if kind is Aggregation else ("loss", 3)
    with pytest.raises(UserError, match=rf"^{kind.__name__} has no method {hook}\(.*\); add it$"):
        getattr(kind(), hook)(*[None] * arguments)


@dataclass(frozen=True)
class Forgetful(Term):
    """Hands over what should be kept, and does not say so."""

    name: ClassVar[str] = "forgetful"

    def keep(self, context):
        return context.steps


@dataclass(frozen=True)
class Mindful(Forgetful):
    """Says so."""

    keeps: ClassVar[tuple[str, ...]] = ("its number of steps",)


@dataclass(frozen=True)
class Asks(Term):
    """Asks for numbers of epochs."""

    name: ClassVar[str] = "asks"
    numbers: ClassVar[list[object]] = []

    def epochs(self, setting, client, cohort, round):
        return self.numbers[client]


def test_epochs_are_whole_numbers_of_pythons(monkeypatch):
    """In one process numpy's worked, and no message to a worker can hold them."""
    monkeypatch.setattr(Asks, "numbers", [None, 0, np.int64(3), np.float64(2), -1, "2"])
    method = Method(objective=SimCLR(), terms=(Asks(),))
    made = [method.epochs(setting(epochs=7), client, [client], 1) for client in range(3)]
    assert made == [7, 0, 3]
    assert {type(epochs) for epochs in made} == {int}
    for client in (3, 4, 5):
        with pytest.raises(UserError, match=r"^'asks'\.epochs returns .*; return a whole number, 0 or more"):
            method.epochs(setting(), client, [client], 1)


def test_a_part_that_keeps_something_must_say_what_or_it_would_be_lost():
    def refused(term):
        return Method(objective=SimCLR(), terms=(term,)).refuse(setting())

    assert refused(Forgetful()) == (
        "'forgetful' overrides keep without declaring in keeps what a client retains, and nothing would be "
        "retained; declare it (keeps = () if nothing is)"
    )
    assert refused(Mindful()) is None
    assert refused(Forgetful(weight=0.0)) is None


@pytest.mark.parametrize("name", ["dcco", "fedsc", "orchestra"])
def test_a_run_whose_only_round_trains_nothing_is_refused(name):
    """It ended with the untrained encoder, without a word."""
    with pytest.raises(UserError, match=rf"'{name}' trains nothing in round 1, .* raise train\.rounds"):
        federation(f"method.name={name}", "train.rounds=1")
    federation(f"method.name={name}", "train.rounds=0")  # the untrained encoder, as asked
    if name != "orchestra":
        federation(f"method.name={name}", "train.rounds=1", f"options.{name}.gather=updates")


def test_what_a_part_sends_against_its_word_is_refused_at_the_door():
    method = Method(objective=SimCLR(), terms=(Tidy(),), aggregation=PrivateFedAvg())
    update = {"weights": model(0), "parts": {}}
    assert method.refuse_update(update, setting()) is None
    update["parts"]["silent"] = 40
    assert method.refuse_update(update, setting()) == (
        "it holds more than weights ('silent'), and 'private_fedavg' covers those only"
    )
    without = replace(method, aggregation=Method(objective=SimCLR()).aggregation)
    assert without.refuse_update(update, setting()) is None


def test_a_users_part_that_hides_what_it_sends_is_refused_before_anything_runs(tmp_path, monkeypatch):
    (tmp_path / "hiding.py").write_text(
        "from dataclasses import dataclass\nfrom atoll.components.base import Term\n\n\n"
        "@dataclass(frozen=True)\nclass Hiding(Term):\n    name = 'hiding'\n\n"
        "    def finish(self, local):\n        return local.data.num_samples\n"
    )
    monkeypatch.chdir(tmp_path)
    recipe = tiny(
        "method.name=ssd", "method.terms=['hiding:Hiding']", "method.aggregation=private_fedavg",
        "train.bn_buffers=leave",
    )  # fmt: skip
    with pytest.raises(UserError, match="'hiding' overrides finish without declaring in egress"):
        Federation(recipe)


def test_all_of_our_own_parts_that_send_something_say_what():
    from atoll.methods.registry import AGGREGATIONS, MERGES, OBJECTIVES, SERVER_STEPS, TERMS

    for kind in (
        *AGGREGATIONS.values(),
        *MERGES.values(),
        *OBJECTIVES.values(),
        *SERVER_STEPS.values(),
        *TERMS.values(),
    ):
        assert kind.finish is Component.finish or kind.egress is not Component.egress, kind


@pytest.mark.parametrize("objective", ["dcco", "fedsc"])
@pytest.mark.parametrize(
    "part",
    [
        "merge=fedema", "merge=fedu", "merge=euc", "terms=['moon']", "aggregation=featarc", "server=fedavgm",
        "server=fedadam",
    ],
)  # fmt: skip
def test_rounds_without_training_are_kept_from_what_they_would_mislead(objective, part):
    settings = ("method.name=fed_simclr", f"method.objective={objective}", f"method.{part}")
    with pytest.raises(
        UserError, match=f"would take them for training; set options.{objective}.gather = 'updates'"
    ):
        federation(*settings)
    federation(*settings, f"options.{objective}.gather=updates")


def test_what_leaves_masked_is_said_to_leave_so():
    """A report of secure aggregation listed the weights as if the server saw each client's."""
    plain, masked = (Method(objective=SimCLR(), aggregation=rule) for rule in (FedAvg(), SecureSum()))
    assert masked.egress[:-1] == plain.egress
    assert masked.egress[-1].startswith("all of these only masked, over Flower")
