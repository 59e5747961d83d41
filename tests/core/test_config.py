"""Options, and the tables and files that describe them."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.config import (
    Options,
    build,
    describe,
    flatten,
    over,
    parse_toml,
    read,
    read_text_table,
    rebuild,
)
from atoll.core.digests import TOML, seal_text
from atoll.core.errors import UserError
from atoll.core.schema import AtMost


@dataclass(frozen=True)
class Inner:
    """A table in a table."""

    pair: tuple[int, float] = (1, 2.0)
    several: tuple[float, ...] = ()


@dataclass(frozen=True)
class Outer(Options, section="outer"):
    """Every kind of value that is converted."""

    inner: Inner = Inner()
    rate: float = 1.0
    tables: dict[str, tuple[float, ...]] | None = None
    day: datetime.date | None = None


TABLES = st.fixed_dictionaries(
    {},
    optional={
        "inner": st.fixed_dictionaries(
            {}, optional={"pair": st.tuples(st.integers(0, 9), st.integers(0, 9)).map(list)}
        ),
        "rate": st.integers(0, 9) | st.floats(0, 1),
        "tables": st.dictionaries(st.sampled_from("ab"), st.lists(st.integers(0, 9))),
    },
)


@given(TABLES)
def test_options_are_their_table_again(table: dict[str, Any]):
    options = build(Outer, table)
    assert build(Outer, describe(options)) == options
    assert isinstance(options.inner, Inner)
    assert type(options.rate) is float
    assert [type(value) for value in options.inner.pair] == [int, float]
    for values in (options.tables or {}).values():
        assert type(values) is tuple
        assert {type(value) for value in values} <= {float}
    for key, value in flatten(table).items():
        found: Any = options
        for name in key.split("."):
            found = found[name] if isinstance(found, dict) else getattr(found, name)
        assert value == (list(found) if isinstance(value, list) else found)


def test_none_is_left_out_and_tuples_are_lists():
    assert describe(Outer(inner=Inner(several=(1.0, 2.0)))) == {
        "inner": {"pair": [1, 2.0], "several": [1.0, 2.0]},
        "rate": 1.0,
    }


@dataclass(frozen=True)
class Many(Options, section="many"):
    """Values within values."""

    inners: tuple[Inner, ...] = (Inner(),)
    named: dict[str, Inner] = field(default_factory=lambda: {"a": Inner((3, 4.0))})
    numbers: list[int] = field(default_factory=list)
    sequence: Sequence[float] = ()
    mapping: Mapping[str, int] = field(default_factory=dict)
    bare: tuple = (1, 2)  # type: ignore[type-arg]
    flag: Literal[True, "auto"] = True
    derived: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "derived", len(self.inners) / 2)
        if len(self.numbers) > 3:
            raise ValueError("numbers are at most three")


def test_values_within_values_are_their_table_again():
    options = Many(inners=(Inner(), Inner((5, 6.0))), numbers=[1], mapping={"x": 2}, flag="auto")
    table = describe(options)
    assert table["inners"] == [{"pair": [1, 2.0], "several": []}, {"pair": [5, 6.0], "several": []}]
    assert table["named"] == {"a": {"pair": [3, 4.0], "several": []}}
    assert "derived" not in table
    assert build(Many, table) == options
    assert (build(Many, table).bare, options.derived) == ((1, 2), 1.0)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"numbers": 3}, r"many\.numbers = 3 is not a list; write many\.numbers = \[3\]"),
        ({"numbers": ["a"]}, r"many\.numbers = 'a' is not a whole number"),
        ({"sequence": ["a"]}, r"many\.sequence = 'a' is not a number"),
        ({"mapping": {"x": "y"}}, r"many\.mapping\.x = 'y' is not a whole number"),
        (
            {"inners": [{"pare": [1, 2]}]},
            r"unknown key 'many\.inners\.pare'; did you mean 'many\.inners\.pair'",
        ),
        ({"flag": False}, r"many\.flag is False; "),
        ({"flag": 1}, r"many\.flag is 1; "),
        ({"numbers": [1, 2, 3, 4]}, "many: numbers are at most three$"),  # by a ValueError of the class
    ],
    ids=str,
)
def test_values_within_values_are_checked(table, said):
    with pytest.raises(UserError, match=f"^{said}"):
        build(Many, table)


def test_options_are_built_again_with_some_values_changed():
    options = Many(inners=(Inner((5, 6.0)),), named={"a": Inner((7, 8.0)), "b": Inner()}, numbers=[1])
    found = rebuild(options, {"named": {"a": {"several": [1]}}, "numbers": None}, "many")
    assert found.inners == options.inners
    assert found.named == {"a": Inner((7, 8.0), (1.0,)), "b": Inner()}
    assert found.numbers == [1]
    with pytest.raises(UserError, match=r"^unknown key 'many\.numbres'; did you mean 'many\.numbers'"):
        rebuild(options, {"numbres": None}, "many")


def test_a_type_that_no_table_holds_is_refused():
    """Types beyond those of TOML have no schema; the conversion compares them."""
    today = datetime.date(2026, 1, 2)
    assert build(Outer, {"day": today}).day == today
    assert build(Outer, {}).day is None
    with pytest.raises(
        UserError, match=r"^outer\.day = 3 is no date, which a recipe cannot hold; let the option be"
    ):
        build(Outer, {"day": 3})


@dataclass(frozen=True)
class Wrong(Options, section="wrong"):
    """Defaults that are invalid, or that conversion changes."""

    share: Annotated[float, AtMost(1)] = 2.0
    rate: float = 1
    none: int = None  # type: ignore[assignment]


def test_a_default_is_checked_and_converted_as_a_value_is():
    for _ in range(2):
        with pytest.raises(UserError, match=r"^wrong\.share is 2\.0; it must be at most 1"):
            Wrong()
        with pytest.raises(UserError, match=r"^wrong\.none = None is not a whole number"):
            Wrong(share=1.0)
        assert isinstance(Wrong(share=1.0, none=1).rate, float)


@pytest.mark.parametrize(
    ("where", "said"), [(None, "outer.rate = 'x'"), ("", "rate = 'x'"), ("here", "here.rate = 'x'")]
)
def test_errors_name_the_place(where, said):
    with pytest.raises(UserError, match=f"^{said} is not a number"):
        build(Outer, {"rate": "x"}, where)


@dataclass(frozen=True)
class Few(Options, section="few"):
    names: tuple[str, ...] = ()
    word: str = "a"
    table: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.word == "b":
            raise UserError("few.word = 'b' is not allowed")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b'names = "x"', "few.names = 'x' is not a list; write few.names = [\"x\"]"),
        (b"word = 1", "few.word = 1 is not a text; put it in quotes"),
        (b"[table]\nx = 1", "few.table.x = 1 is not a text; put it in quotes"),
        (b"wrd = 1", "unknown key 'few.wrd'; did you mean 'few.word'?"),
        (b'word = "b"', "few.word = 'b' is not allowed"),
    ],
)
def test_a_wrong_value_in_a_file_names_the_file_and_nothing_for_a_shell(text, sentence):
    with pytest.raises(UserError) as error:
        build(Few, parse_toml(text, "a/few.toml"), file=Path("a/few.toml"))
    assert str(error.value) == f"a/few.toml: {sentence}"


def test_a_wrong_value_in_a_text_names_no_file():
    with pytest.raises(UserError, match=r"^few\.word = 1 .* \(in a shell: --set"):
        build(Few, parse_toml("word = 1", "this recipe"))


def test_classes_without_a_section_have_no_place():
    with pytest.raises(UserError, match=r"^pair needs 2 values"):
        build(Inner, {"pair": [1]})


def test_tables_are_overridden_key_by_key_and_the_base_stays():
    base = {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    assert over(base, {"a": {"c": {"f": 4}}, "e": {"g": 5}}) == {
        "a": {"b": 1, "c": {"d": 2, "f": 4}},
        "e": {"g": 5},
    }
    assert base == {"a": {"b": 1, "c": {"d": 2}}, "e": 3}


def test_a_file_may_have_any_suffix_and_a_base_in_its_folder(tmp_path):
    (tmp_path / "lower").write_text("a = 1\n[t]\nb = 2\n")
    (tmp_path / "upper.toml").write_text('base = "lower"\n[t]\nc = 3\n')
    assert read("upper.toml", {}, folder=tmp_path) == {"a": 1, "t": {"b": 2, "c": 3}}
    assert read_text_table(tmp_path / "upper.toml") == {"base": "lower", "t": {"c": 3}}
    with pytest.raises(UserError, match=r"^there is no recipe .*absent\.toml$"):
        read("absent.toml", {}, folder=tmp_path)
    with pytest.raises(UserError, match=r"^no recipe 'uper': .*did you mean 'upper'\?"):
        read("uper", {"upper": ""}, folder=tmp_path)


def test_a_folder_is_answered_with_the_file_in_it(tmp_path):
    (tmp_path / "run").mkdir()
    inside = tmp_path / "run" / "recipe.toml"
    inside.write_text("a = 1\n")
    with pytest.raises(UserError) as error:
        read(str(tmp_path / "run"), {})
    assert str(error.value) == f"{tmp_path / 'run'} is a folder; give the recipe in it: {inside}"


def test_the_file_of_a_run_is_read_without_its_digest(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_bytes(seal_text(b"a = 1\n", TOML))
    assert read(str(path), {}) == {"a": 1}
    path.write_bytes(path.read_bytes().replace(b"a = 1", b"a = 2"))
    with pytest.raises(UserError, match="it differs from what Atoll wrote; if you changed it on purpose"):
        read(str(path), {})
    path.write_bytes(path.read_bytes().partition(b"\n")[2])
    assert read(str(path), {}) == {"a": 2}
