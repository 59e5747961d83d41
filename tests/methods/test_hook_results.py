"""What the hooks of a user's components may return."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch

from atoll.aggregation.fedavg import FedAvg
from atoll.components.base import Aggregation, Deployment, ServerStep, Term
from atoll.core.errors import UserError
from tests.harness import run_tiny


class ByClient:
    def __init__(self, state):
        self.state = state

    def add(self, client, piece):
        self.state[client] = piece

    def close(self):
        return self.state


@dataclass(frozen=True)
class Returns(Term):
    """Returns from one hook what no file can hold."""

    name: ClassVar[str] = "returns"
    egress: ClassVar[tuple[str, ...]] = ("a number",)
    keeps: ClassVar[tuple[str, ...]] = ("a number",)
    hook: str = ""

    def value(self, hook):
        if hook == self.hook:
            return {
                "init": {3: 1},
                "send": {"a": [np.zeros(2)]},
                "finish": {1, 2},
                "keep": {"rounds": np.int64(3)},
                "constants": torch.eye(2).to_sparse(),
            }[hook]
        return {} if hook == "init" else None

    def constants(self, setting, prerequisites):
        return self.value("constants")

    def init(self, setting):
        return self.value("init")

    def send(self, state, client, cohort, round):
        return self.value("send")

    def declares(self, setting):
        return None

    def fold(self, state, setting, round):
        return ByClient(state) if self.hook == "fold" else None

    def loss(self, context, batch, passes):
        return torch.zeros(())

    def finish(self, context):
        return self.value("finish")

    def keep(self, context):
        return self.value("keep")


@pytest.mark.parametrize(
    ("hook", "what"),
    [
        ("constants", r"a tensor of torch\.sparse_coo and torch\.float32, which no file can hold"),
        ("init", "a dict with the key 3, of type int"),
        ("send", r"a numpy\.ndarray"),
        ("finish", "a set"),
        ("keep", r"a numpy\.int64"),
        ("fold", "a dict with the key 0, of type int"),
    ],
)
def test_what_no_file_can_hold_is_named_with_its_hook(hook, what, tmp_path):
    """A number as a key came back as a text from a checkpoint, and a resumed run found nothing under it."""
    settings = (f"method.terms=['{__name__}:Returns']", f"options.returns.hook={hook}")
    with pytest.raises(
        UserError, match=rf"^'returns'\.{hook} returns {what}; states and messages are made of"
    ):
        run_tiny(tmp_path / "run", "method.name=fed_simclr", *settings)


@dataclass(frozen=True)
class Closes(Aggregation):
    """Closes with the models that it was given, spoiled."""

    name: ClassVar[str] = "closes"
    how: str = ""

    def open(self, models, setting, round, scratch):
        if self.how == "not opened":
            return None
        self_how, name = self.how, "encoder.conv1.weight"

        class Given:
            def add(self, client, update, geometry):
                pass

            def close(self):
                rest = {key: value for key, value in models["global"].items() if key != name}
                return {
                    "nothing": None,
                    "no model": {},
                    "a list": {"global": [torch.ones(2)]},
                    "bare weights": models["global"],
                    "no weight": {"global": rest},
                    "doubles": {"global": {**rest, name: models["global"][name].double()}},
                    "another model": {**models, "velocity": rest},
                    "another weight": {"global": {**models["global"], "velocity": torch.ones(2)}},
                    "no number": {"global": {**rest, name: models["global"][name] / 0}},
                }[self_how]

        return Given()


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("nothing", "nothing; return the models by name"),
        ("a list", r"a list for the weight '.*' of model 'global', which is a tensor \("),
        ("no model", "a dict without 'global'; return the models by name"),
        ("bare weights", "a dict without 'global'; return the models by name"),
        ("another model", r"a dict with 'velocity', which models\(\) lacks; return the models by name"),
        ("another weight", "the weight 'velocity', which model 'global' does not have"),
        (
            "no weight",
            r"nothing for the weight 'encoder\.conv1\.weight' of model 'global', which is a tensor \(",
        ),
        (
            "doubles",
            r"a tensor \(.*\) of torch\.float64 for the weight 'encoder\.conv1\.weight' of model 'global'",
        ),
        (
            "no number",
            r"values that are not finite, or that overflow, for the weight 'encoder\.conv1\.weight' of model "
            "'global'; the clients' updates were finite",
        ),
    ],
)
def test_a_fold_that_closes_without_the_models_is_named(how, what, tmp_path):
    settings = (f"method.aggregation={__name__}:Closes", f"options.closes.how={how}")
    with pytest.raises(UserError, match=f"^the fold of 'closes' closes with {what}"):
        run_tiny(tmp_path / "run", "method.name=fed_simclr", *settings)


@dataclass(frozen=True)
class Steps(ServerStep):
    """Returns the folded model, spoiled."""

    name: ClassVar[str] = "steps"
    how: str = ""

    def step(self, state, current, folded, setting):
        name = "encoder.conv1.weight"
        rest = {key: value for key, value in folded.items() if key != name}
        return None, rest if self.how == "no weight" else {**rest, name: folded[name] / 0}


@pytest.mark.parametrize(
    ("how", "what"), [("no weight", "nothing"), ("no number", "values that are not finite")]
)
def test_a_server_step_that_spoils_the_model_is_named(how, what, tmp_path):
    settings = (f"method.server={__name__}:Steps", f"options.steps.how={how}")
    with pytest.raises(UserError, match=rf"^the step of 'steps' returns {what}.* 'encoder\.conv1\.weight'"):
        run_tiny(tmp_path / "run", "method.name=fed_simclr", *settings)


def test_an_aggregation_that_opens_no_fold_is_named(tmp_path):
    settings = (f"method.aggregation={__name__}:Closes", "options.closes.how='not opened'")
    with pytest.raises(
        UserError, match=r"^'closes'\.open returns nothing; return an object with add\(client"
    ):
        run_tiny(tmp_path / "run", "method.name=fed_simclr", *settings)


@dataclass(frozen=True)
class Chosen(FedAvg):
    """Chooses its cohorts."""

    name: ClassVar[str] = "chosen"
    how: str = ""

    def cohort(self, setting, round):
        return {
            "twice": [0, 0],
            "beyond": [0, setting.num_clients],
            "negative": [-1],
            "a text": "01",
            "no numbers": [0.0],
            "numpy": np.array([1, 0]),
        }[self.how]


def run_chosen(folder, how):
    settings = (f"method.aggregation={__name__}:Chosen", f"options.chosen.how={how}")
    return run_tiny(folder, "method.name=fed_simclr", *settings)


@pytest.mark.parametrize("how", ["twice", "beyond", "negative", "a text", "no numbers"])
def test_a_cohort_of_other_than_different_clients_is_refused(how, tmp_path):
    """A client that was drawn twice trained twice, and its update counted twice."""
    with pytest.raises(
        UserError, match=r"^'chosen'\.cohort returns .*; return different clients from 0 to 3"
    ):
        run_chosen(tmp_path / "run", how)


def test_a_cohort_may_be_an_array_of_numpy(tmp_path):
    """The metrics could not be written."""
    metrics = run_chosen(tmp_path / "run", "numpy").metrics
    assert {line["clients"] for line in metrics if line["round"]} == {2}


@dataclass(frozen=True)
class Reads(Aggregation):
    """Reads from an update what its statistics do not name."""

    name: ClassVar[str] = "reads"
    key: str = ""

    def open(self, models, setting, round, scratch):
        key = self.key

        class Keyed:
            def add(self, client, update, geometry):
                return update[key]

            def close(self):
                return models

        return Keyed()


@pytest.mark.parametrize("key", ["samples", "loss"])
def test_a_number_that_statistics_do_not_name_is_said_to_lack_there(key, tmp_path):
    settings = (f"method.aggregation={__name__}:Reads", f"options.reads.key={key}")
    with pytest.raises(UserError, match=rf"^the fold of 'reads' reads update\['{key}'\], which .*statistics"):
        run_tiny(tmp_path / "run", "method.name=fed_simclr", *settings)


def test_another_missing_key_of_a_fold_stays_as_it_is(tmp_path):
    settings = (f"method.aggregation={__name__}:Reads", "options.reads.key=mine")
    with pytest.raises(KeyError, match="mine"):
        run_tiny(tmp_path / "run", "method.name=fed_simclr", *settings)


class Forgets(FedAvg):
    """Adds nothing."""

    name: ClassVar[str] = "forgets"

    def open(self, models, setting, round, scratch):
        fold = super().open(models, setting, round, scratch)
        fold.add = lambda client, update, geometry: None
        return fold


def test_a_fold_that_adds_nothing_is_warned_of(tmp_path):
    """The run ended with its initial model, and nothing said so."""
    with pytest.warns(UserWarning, match=r"the fold of 'forgets' closes with the models of before; check"):
        run_tiny(tmp_path / "run", "method.name=fed_simclr", f"method.aggregation={__name__}:Forgets")


@dataclass(frozen=True)
class Remembers(FedAvg):
    """Keeps a model that is no result."""

    name: ClassVar[str] = "remembers"

    def models(self, start, setting):
        return {"global": start, "velocity": start}

    def open(self, models, setting, round, scratch):
        fold = super().open(models, setting, round, scratch)
        close = fold.close
        fold.close = lambda: {**models, **close()}
        return fold

    def deploy(self, models, state):
        return Deployment({"global": models["global"]})


@pytest.mark.parametrize("server", ["direct", "fedavgm"])
def test_a_server_step_that_moves_a_model_that_is_no_result_is_warned_of(server, tmp_path, recwarn):
    settings = (f"method.aggregation={__name__}:Remembers", f"method.server={server}", "train.rounds=1")
    run_tiny(tmp_path / "run", "method.name=fed_simclr", *settings)
    found = [str(one.message) for one in recwarn if "also moves the model 'velocity'" in str(one.message)]
    assert len(found) == (server == "fedavgm")
