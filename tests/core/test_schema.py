"""Options, bounds and sentences: what an annotation says is what is refused, wherever the value comes from."""

import math
import re
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import pytest

from atoll.components.training import TrainOptions
from atoll.core.config import Options, build
from atoll.core.errors import UserError
from atoll.core.schema import (
    Above,
    AtLeast,
    AtMost,
    Below,
    Infinite,
    MinLength,
    OneOf,
    Rising,
    descriptions,
    schema_of,
)
from atoll.objectives.simclr import SimCLR


@dataclass(frozen=True)
class Numbers(Options, section="numbers"):
    """Bounds of every kind.

    Attributes:
        rate: of what happens,
            told on two lines.
        n: n, a symbol.
    """

    rate: Annotated[float, Above(0), AtMost(1)] = 0.5
    n: Annotated[int, AtLeast(2, "two make a pair")] = 2
    momentum: Annotated[float, AtLeast(0), Below(1)] = 0.0
    plain: float = 0.0
    bound: Annotated[float, Above(0), Infinite()] = math.inf
    maybe: Annotated[int, Above(0)] | None = None
    colour: Literal["red", "green"] = "red"
    size: Literal[1, 2] = 1
    word: Annotated[str, OneOf({"one": 1, "two": 2})] = "one"
    widths: tuple[Annotated[int, Above(0)], ...] = (1,)
    some: Annotated[tuple[float, ...], MinLength(1)] = (0.0,)
    span: Annotated[tuple[Annotated[float, Above(0)], Annotated[float, AtMost(1)]], Rising()] = (0.5, 1.0)
    pair: tuple[float, float] = (1.0, 2.0)
    tables: dict[str, Annotated[int, Above(0)]] | None = None


GOOD: list[dict[str, Any]] = [
    {"rate": 1},
    {"rate": 1e-300},
    {"n": 2},
    {"momentum": 0},
    {"momentum": 0.999},
    {"bound": math.inf},
    {"maybe": 1},
    {"maybe": None},
    {"colour": "green"},
    {"size": 2},
    {"word": "two"},
    {"widths": []},
    {"span": [1, 1]},
    {"tables": {"a": 1}},
]
BAD: list[tuple[dict[str, Any], str]] = [
    ({"rate": 0}, "numbers.rate is 0; it must be above 0 and at most 1"),
    ({"rate": 1.01}, "numbers.rate is 1.01; it must be above 0 and at most 1"),
    ({"rate": math.nan}, "numbers.rate is nan; it must be a finite number above 0 and at most 1"),
    ({"n": 1}, "numbers.n is 1; it must be at least 2 (two make a pair)"),
    ({"momentum": 1}, "numbers.momentum is 1; it must be at least 0 and below 1"),
    ({"momentum": -0.1}, "numbers.momentum is -0.1; it must be at least 0 and below 1"),
    ({"plain": math.inf}, "numbers.plain is inf; it must be a finite number"),
    ({"plain": math.nan}, "numbers.plain is nan; it must be a finite number"),
    ({"bound": -math.inf}, "numbers.bound is -inf"),
    ({"bound": math.nan}, "numbers.bound is nan"),
    ({"maybe": 0}, "numbers.maybe is 0; it must be above 0"),
    ({"maybe": "x"}, "numbers.maybe = 'x' is not a whole number"),
    ({"colour": "gren"}, "numbers.colour is 'gren'; did you mean 'green'?"),
    ({"size": 3}, "numbers.size is 3; known: 1, 2"),
    ({"size": True}, "numbers.size is True; known: 1, 2"),
    ({"word": "twoo"}, "numbers.word is 'twoo'; did you mean 'two'?"),
    ({"widths": [1, 0]}, "numbers.widths is [1, 0]; each must be above 0"),
    ({"widths": ["a"]}, "numbers.widths = 'a' is not a whole number"),
    ({"widths": 3}, "numbers.widths = 3 is not a list"),
    ({"some": []}, "numbers.some is []; it must be a list of at least 1"),
    ({"span": [0.5, 2]}, "numbers.span is [0.5, 2]; it must be two numbers, 0 < low <= high <= 1"),
    ({"span": [0.5, 0.2]}, "numbers.span is [0.5, 0.2]; it must be two numbers"),
    ({"pair": [1]}, "numbers.pair needs 2 values"),
    ({"tables": {"a": 0}}, "numbers.tables.a is 0; it must be above 0"),
]


@pytest.mark.parametrize("table", GOOD)
def test_what_bounds_allow_is_taken_from_a_table_and_from_python(table: dict[str, Any]) -> None:
    assert build(Numbers, table, "numbers") == Numbers(**table)


@pytest.mark.parametrize(("table", "sentence"), BAD)
def test_what_they_forbid_gets_one_sentence_in_both(table: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match="^" + re.escape(sentence)):
        build(Numbers, table, "numbers")
    with pytest.raises(UserError, match="^" + re.escape(sentence)):
        Numbers(**table)


def test_lists_become_tuples_and_whole_numbers_floats_in_both() -> None:
    for made in (Numbers(plain=1, pair=[1, 2]), build(Numbers, {"plain": 1, "pair": [1, 2]})):  # type: ignore[arg-type]
        assert made.pair == (1.0, 2.0)
        assert isinstance(made.plain, float)
        hash(made)


def test_a_section_and_a_component_know_their_place() -> None:
    with pytest.raises(UserError, match=r"^train\.lr is -1; it must be above 0 and at most 1000000$"):
        TrainOptions(lr=-1)
    with pytest.raises(UserError, match=r"^options\.simclr\.temperature is -1; it must be above 0$"):
        SimCLR(temperature=-1)


def test_a_place_that_build_is_given_comes_first() -> None:
    with pytest.raises(UserError, match=r"^elsewhere\.lr is -1"):
        build(TrainOptions, {"lr": -1}, "elsewhere")


def test_meanings_come_from_docstrings_and_those_of_bases() -> None:
    @dataclass(frozen=True)
    class More(Numbers):
        """More.

        Attributes:
            n: ``"n"`` otherwise.

        Raises:
            m: nothing.
        """

        name: ClassVar[str] = "more"

    assert descriptions(Numbers) == {"rate": "Of what happens, told on two lines.", "n": "n, a symbol."}
    assert descriptions(More) == {"rate": "Of what happens, told on two lines.", "n": '`"n"` otherwise.'}
    assert schema_of(More)["properties"]["n"] == {
        "type": "integer",
        "minimum": 2,
        "x-why": "two make a pair",
        "description": '`"n"` otherwise.',
        "default": 2,
    }


def test_a_key_without_a_default_must_be_there() -> None:
    @dataclass(frozen=True)
    class Needs:
        name: str
        n: int = 1

    assert build(Needs, {"name": "a"}) == Needs("a")
    with pytest.raises(UserError, match=r"^here\.name is missing"):
        build(Needs, {"n": 1}, "here")
