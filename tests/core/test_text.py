import pytest

from atoll.core.text import clean, first_line, one_line, short


@pytest.mark.parametrize("text", ["", "cat", "Ångström ε = 0,5 — 猫", "[/x] :smile: <b>"])
def test_text_stays_as_it_is(text):
    assert clean(text) == text


@pytest.mark.parametrize(
    "letter", ["\0", "\x07", "\x1b", "\n", "\t", "\x7f", "\x9b", "\u202e", "\u2028", "\ud800"]
)
def test_control_characters_are_replaced(letter):
    assert clean(f"a{letter}b") == "a�b"


def test_long_texts_become_one_short_line():
    assert one_line("a\n\n b\tc") == "a b c"
    assert one_line("x" * 5000) == "x" * 1000 + " …"
    assert len(short({"x" * 10**6: ["y" * 10**6] * 100})) < 300
    assert short("a\u202eb") == "'a\\u202eb'"


def test_an_error_without_a_message_is_named_by_its_type():
    assert first_line(AssertionError()) == "AssertionError"
    assert first_line(ValueError("one\ntwo")) == "one"
