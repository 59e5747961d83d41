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
class Headed(Term):
    """Names its head like a network that each method has."""

    name: ClassVar[str] = "headed"

    def heads(self, setting):
        return {"projector": torch.nn.Linear(3, 3)}

    def loss(self, context, batch, passes):
        return torch.zeros(())


def test_a_head_that_is_named_like_another_network_is_refused(tmp_path):
    """There was no second component to leave out."""
    with pytest.raises(
        UserError, match=r"^the head 'projector' of 'headed' has other sizes than the network of"
    ):
        run_tiny(tmp_path / "run", "method.name=fed_simclr", f"method.terms=['{__name__}:Headed']")


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


@dataclass(frozen=True)
class Wrong(Term):
    """Returns from one hook something of another kind."""

    name: ClassVar[str] = "wrong"
    hook: str = ""

    def of(self, hook, usual):
        return None if hook == self.hook else usual

    def heads(self, setting):
        if self.hook == "lazy":
            return {"lazy": torch.nn.LazyLinear(3)}
        return self.of("heads", {})

    def refuse(self, setting):
        return self.hook == "refuse"

    def refuse_networks(self, networks):
        return self.hook == "refuse_networks"

    def after_heads(self, context):
        return self.of("after_heads", {})

    def inputs(self, context, batch):
        return self.of("inputs", {})

    def fold(self, state, setting, round):
        return {} if self.hook == "fold" else None

    def loss(self, context, batch, passes):
        return torch.zeros(())


@pytest.mark.parametrize(
    ("hook", "sentence"),
    [
        ("heads", r"'wrong'\.heads returns nothing; return a dict of modules by name"),
        ("lazy", r"the head 'lazy' of 'wrong' has weights without a size, as of LazyLinear"),
        ("refuse", r"'wrong'\.refuse returns a bool; return the reason in a sentence, or None"),
        ("refuse_networks", r"'wrong'\.refuse_networks returns a bool; return the reason"),
        ("after_heads", r"'wrong'\.after_heads returns nothing; return a dict of functions by head"),
        ("inputs", r"'wrong'\.inputs returns nothing; return a dict of images by name"),
        ("fold", r"'wrong'\.fold returns a dict; return an object with add\(client, piece\) and close\(\)"),
    ],
)
def test_a_result_of_another_kind_is_named_with_its_hook(hook, sentence, tmp_path):
    """Tracebacks ended in Atoll's code, without the name of the component."""
    settings = (f"method.terms=['{__name__}:Wrong']", f"options.wrong.hook={hook}")
    with pytest.raises(UserError, match=f"^{sentence}"):
        run_tiny(tmp_path / "run", "method.name=fed_simclr", *settings)


@dataclass(frozen=True)
class Misled(FedAvg):
    """Returns from one hook models of another form."""

    name: ClassVar[str] = "misled"
    hook: str = ""

    def models(self, start, setting):
        return {"main": start} if self.hook == "models" else super().models(start, setting)

    def sent(self, models, client):
        return models["global"] if self.hook == "sent" else models

    def deploy(self, models, state):
        return models if self.hook == "deploy" else super().deploy(models, state)

    def spent(self, setting, round):
        return {"epsilon": 1.0} if self.hook == "spent" else {}


class Least(FedAvg):
    """Has a method where a number belongs."""

    name: ClassVar[str] = "least"

    def least_updates(self):
        return 2


@pytest.mark.parametrize(
    ("hook", "sentence"),
    [
        ("models", r"'misled'\.models returns the models 'main', and its choose reads the model \"global\""),
        ("sent", r"'misled'\.sent\(\)\['[\w.]+'\] returns a tensor .*; return the models by name, such as"),
        ("deploy", r"'misled'\.deploy returns a dict; return a Deployment, such as"),
        ("spent", r"'misled'\.spent returns \{'epsilon': 1\.0\}; return"),
    ],
)
def test_models_of_another_form_are_named_with_their_hook(hook, sentence, tmp_path):
    settings = (f"method.aggregation={__name__}:Misled", f"options.misled.hook={hook}")
    with pytest.raises(UserError, match=f"^{sentence}"):
        run_tiny(tmp_path / "run", "method.name=fed_simclr", *settings)


def test_a_method_in_place_of_the_least_number_of_updates_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"^'least'\.least_updates is a method and must be a whole number"):
        run_tiny(tmp_path / "run", "method.name=fed_simclr", f"method.aggregation={__name__}:Least")


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
