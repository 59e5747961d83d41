from dataclasses import dataclass
from typing import ClassVar

import pytest

from atoll.errors import UserError
from atoll.parts import Aggregation, Merge, Objective, Part, Term
from harness import tiny

FAMILIES = [Part, Objective, Term, Merge, Aggregation]


def declare(base, name, hint="int", /, **members):
    """A part of a user's own that annotates this name."""
    return dataclass(frozen=True)(type("Mine", (base,), {"__annotations__": {name: hint}, **members}))


@pytest.mark.parametrize(
    ("base", "name"),
    [(Term, "start"), (Term, "loss"), (Objective, "keeps"), (Merge, "alone"), (Aggregation, "open")]
    + [(base, name) for base in FAMILIES for name in ("finish", "epochs", "egress", "name")],
)
@pytest.mark.parametrize("hint", ["int", int])
def test_an_option_named_like_a_hook_is_refused(base, name, hint):
    with pytest.raises(UserError, match=rf"^Mine\.{name} is an option named like a part's own '{name}'"):
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
        "Both", (declare(Part, "rate", rate=3), Term), {"__annotations__": {"rate": "int"}, "rate": 4}
    )
    assert dataclass(frozen=True)(both)().rate == 4


def test_a_users_module_with_such_an_option_is_a_sentence(tmp_path, monkeypatch):
    (tmp_path / "shadowing.py").write_text(
        "from dataclasses import dataclass\nfrom atoll.parts import Term\n\n\n"
        "@dataclass(frozen=True)\nclass Slow(Term):\n    start: int = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"^term 'shadowing:Slow': Slow\.start is an option"):
        tiny("method.name=ssd", "method.terms=['shadowing:Slow']")
