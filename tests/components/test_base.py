import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from atoll.components.base import Aggregation, Component, Merge, Objective, Term
from atoll.core.errors import UserError
from tests.harness import run_tiny, tiny

FAMILIES = [Component, Objective, Term, Merge, Aggregation]


def declare(base, name, hint="int", /, **members):
    """A component of a user's own that annotates this name."""
    return dataclass(frozen=True)(type("Mine", (base,), {"__annotations__": {name: hint}, **members}))


@pytest.mark.parametrize(
    ("base", "name"),
    [(Term, "start"), (Term, "loss"), (Objective, "keeps"), (Merge, "alone"), (Aggregation, "open")]
    + [(base, name) for base in FAMILIES for name in ("finish", "epochs", "egress", "name")],
)
@pytest.mark.parametrize("hint", ["int", int])
def test_an_option_named_like_a_hook_is_refused(base, name, hint):
    with pytest.raises(
        UserError, match=rf"^Mine\.{name} is an option with the name of the inherited attribute '{name}'"
    ):
        declare(base, name, hint)
    with pytest.raises(UserError, match="give it another name"):
        declare(base, name, hint, **{name: 3})


def test_other_options_and_class_attributes_are_not():
    assert declare(Term, "rate", rate=3)().rate == 3
    assert declare(Term, "weight", "float", weight=0.5)().weight == 0.5  # an option already
    keeper = declare(Objective, "keeps", ClassVar[tuple[str, ...]], keeps=("a queue",))
    assert keeper.keeps == ("a queue",)
    assert declare(keeper, "started", "int", started=0)().started == 0
    both = type(
        "Both", (declare(Component, "rate", rate=3), Term), {"__annotations__": {"rate": "int"}, "rate": 4}
    )
    assert dataclass(frozen=True)(both)().rate == 4


def test_options_of_a_class_that_is_no_dataclass_are_refused():
    class Plain(Term):
        rate: float = 0.5
        known: ClassVar[int] = 3

    with pytest.raises(UserError, match=r"Plain\.rate is no option yet; write @dataclass\(frozen=True\)"):
        Plain()
    assert dataclass(frozen=True)(Plain)().rate == 0.5

    @dataclass(frozen=True)
    class Derived(Plain):
        pass

    class WithoutOptions(Derived):
        pass

    assert WithoutOptions(weight=0.25).weight == 0.25


def test_a_default_without_annotation_is_refused():
    with pytest.raises(UserError, match=r"Mine\.weight has no annotation, .*; write weight: TYPE = 0\.1"):
        type("Mine", (Term,), {"weight": 0.1})


def test_a_users_module_with_such_an_option_is_a_sentence(tmp_path, monkeypatch):
    (tmp_path / "shadowing.py").write_text(
        "from dataclasses import dataclass\nfrom atoll.components.base import Term\n\n\n"
        "@dataclass(frozen=True)\nclass Slow(Term):\n    start: int = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"^term 'shadowing:Slow': Slow\.start is an option"):
        tiny("method.name=ssd", "method.terms=['shadowing:Slow']")


@pytest.mark.parametrize(
    ("axis", "base", "name"),
    [
        ("objective", "Objective", "simclr"),
        ("terms", "Term", "simclr"),  # whichever axis has the name
        ("terms", "Term", "pd"),
        ("merge", "Merge", "replace"),
        ("aggregation", "Aggregation", "fedavg"),
        ("server", "ServerStep", "direct"),
        ("terms", "Term", ""),
        ("terms", "Term", " "),
        ("terms", "Term", "loss"),
    ],
)
def test_a_part_needs_a_name_of_its_own(axis, base, name, tmp_path, monkeypatch, request):
    module = f"named_{request.node.callspec.indices['axis']}"
    (tmp_path / f"{module}.py").write_text(
        f"from dataclasses import dataclass\nfrom atoll.components.base import {base}\n\n\n"
        f"@dataclass(frozen=True)\nclass Mine({base}):\n    name = {name!r}\n\n\n"
        f"@dataclass(frozen=True)\nclass Own({base}):\n    name = 'own'\n"
    )
    monkeypatch.chdir(tmp_path)
    named = (
        (lambda component: f"['{module}:{component}']")
        if axis == "terms"
        else (lambda component: f"{module}:{component}")
    )
    with pytest.raises(
        UserError,
        match=rf"name of the component Mine is '{name}', which is blank or used by another component; give",
    ):
        tiny(f"method.{axis}={named('Mine')}")
    assert "own" in {
        component.name for component in tiny(f"method.{axis}={named('Own')}").composed.components
    }


@pytest.mark.parametrize("name", ["my.term", "my=term"])
def test_a_name_under_which_no_option_can_be_set_is_refused(name):
    """--set options.my.term.weight=0.2 is a key of options.my."""
    kind = dataclass(frozen=True)(type("Mine", (Term,), {"name": name}))
    with pytest.raises(
        UserError, match=rf"^the name of the component Mine is '{name}'; write it without . and ="
    ):
        kind()


@pytest.mark.parametrize(
    "value", [Path("weights"), torch.ones(2), [Path("weights")], {1: 0.5}, [1, None], len]
)
def test_an_option_that_no_recipe_can_hold_is_refused(value):
    """A run of it ended in a traceback."""

    @dataclass(frozen=True)
    class Mine(Term):
        name: ClassVar[str] = "mine"
        own: Any = None

    assert Mine(own=[{"a": (1, 0.5, True, "b")}]).own
    with pytest.raises(
        UserError, match=r"^options\.mine\.own = .* cannot be written in a recipe; an option is"
    ):
        Mine(own=value)


def test_slots_are_refused_by_their_name():
    with pytest.raises(UserError, match=r"Mine has slots, .* leave out slots=True$"):

        @dataclass(frozen=True, slots=True)
        class Mine(Term):
            name: ClassVar[str] = "mine"


def test_an_option_that_is_none_against_its_default_is_refused():
    """A recipe cannot hold it, so that a resumed run trained with the default."""

    @dataclass(frozen=True)
    class Mine(Term):
        name: ClassVar[str] = "mine"
        margin: float | None = 0.5
        plain: float | None = None
        derived: object = field(init=False, default=len)  # no option

    assert Mine(plain=None).margin == 0.5
    with pytest.raises(
        UserError, match=r"^options\.mine\.margin is None, which cannot be written .* its default is 0\.5;"
    ):
        Mine(margin=None)


def test_a_recipe_changes_single_options_of_a_users_method(tmp_path, monkeypatch):
    (tmp_path / "nested.py").write_text(
        "from dataclasses import dataclass\nfrom typing import ClassVar\n"
        "from atoll.components.base import Term\nfrom atoll.methods.method import Method\n"
        "from atoll.objectives.simclr import SimCLR\n\n\n"
        "@dataclass(frozen=True)\nclass Inner:\n    a: int = 1\n    b: float = 0.5\n\n\n"
        "@dataclass(frozen=True)\nclass Nested(Term):\n    name: ClassVar[str] = 'nested'\n"
        "    inner: Inner = Inner()\n\n\n"
        "METHOD = Method(objective=SimCLR(), terms=(Nested(inner=Inner(5, 9.0)),))\n"
    )
    monkeypatch.chdir(tmp_path)
    (term,) = tiny("method.name=nested:METHOD", "options.nested.inner.a=2").composed.terms
    assert (term.inner.a, term.inner.b) == (2, 9.0)
    for reset in ("options.nested.inner.a=", "options.nested.inner=", "options.nested="):
        (term,) = tiny("method.name=nested:METHOD", reset).composed.terms
        assert (term.inner.a, term.inner.b) == (5, 9.0)


def test_two_parts_of_one_name_would_share_their_state(tmp_path, monkeypatch):
    (tmp_path / "twins.py").write_text(
        "from dataclasses import dataclass\nfrom atoll.components.base import Objective, Term\n\n\n"
        "@dataclass(frozen=True)\nclass One(Objective):\n    name = 'twin'\n\n\n"
        "@dataclass(frozen=True)\nclass Other(Term):\n    name = 'twin'\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="name of the component Other is 'twin'"):
        tiny("method.objective=twins:One", "method.terms=['twins:Other']")


def test_our_own_parts_may_be_named_by_their_place():
    place = "atoll.objectives.simclr:SimCLR"
    assert tiny(f"method.objective={place}").composed.objective.name == "simclr"


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (
            "passes[Forward('view1')].z.square().sum(dim=1)",
            r"has shape \(20,\) and must be a scalar; return its",
        ),
        ("3.0", "is a float; return a tensor of torch"),
        ("1j * passes[Forward('view1')].z.mean()", r"is complex and must be real; return its abs\(\)"),
    ],
)
def test_a_loss_that_is_no_real_scalar_tensor_is_a_mistake(tmp_path, monkeypatch, loss, sentence):
    (tmp_path / "rows.py").write_text(
        "from dataclasses import dataclass\nfrom atoll.components.base import Forward, Term\n\n\n"
        "@dataclass(frozen=True)\nclass Rows(Term):\n    name = 'rows'\n\n"
        "    def forwards(self):\n        return [Forward('view1')]\n\n"
        f"    def loss(self, local, batch, passes):\n        return {loss}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "rows", raising=False)
    with pytest.raises(UserError, match=f"loss of 'rows' {sentence}"):
        run_tiny(tmp_path / "run", "method.name=fed_simclr", "method.terms=['rows:Rows']")


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        ("'items': torch.nn.Linear(1, 1)", "'items' of 'headed' .*already exists"),
        ("'a.b': torch.nn.Linear(1, 1)", "'a.b' of 'headed' .*can't contain"),
        ("'mine': torch.ones(3)", "'mine' of 'headed' .*not a Module"),
    ],
)
def test_a_head_that_no_network_can_hold_is_a_sentence(tmp_path, monkeypatch, head, reason):
    (tmp_path / "headed.py").write_text(
        "from dataclasses import dataclass\nimport torch\nfrom atoll.components.base import Term\n\n\n"
        "@dataclass(frozen=True)\nclass Headed(Term):\n    name = 'headed'\n\n"
        f"    def heads(self, setting):\n        return {{{head}}}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "headed", raising=False)
    with pytest.raises(UserError, match=f"head {reason}.*modules by name, without dots"):
        run_tiny(tmp_path / "run", "method.name=fed_simclr", "method.terms=['headed:Headed']")
