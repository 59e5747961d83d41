"""Hooks of a user's components that return something of another kind, or of another form."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from atoll.aggregation.fedavg import FedAvg
from atoll.components.base import Term
from atoll.core.errors import UserError
from tests.harness import run_tiny


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
