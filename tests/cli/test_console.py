"""The terminal's output."""

import pytest

from atoll.cli.console import make_console, results_table


def test_a_closed_output_is_an_error_of_its_own_kind():
    """Rich would end the program with 1, and `main` ends it with 141."""
    with pytest.raises(BrokenPipeError):
        make_console().on_broken_pipe()


def test_no_control_character_of_a_text_reaches_the_terminal(capsys):
    """A title may come from elsewhere: in a run's folder, or from a site."""
    table = results_table({"knn/k\x1b[2J": "\x1b]0;owned\x07", "probe/lr": 0.1})
    make_console().print(table, "two\nlines\x9b")
    out = capsys.readouterr().out
    assert all(letter.isprintable() or letter == "\n" for letter in out)
    assert "knn/k[2J │ ]0;owned" in out
    assert "two\nlines\n" in out


def test_a_constant_that_does_not_apply_has_no_row():
    """``finetune-10`` has no hidden layers and differs in nothing; its rows were empty."""
    table = results_table({"finetune-10/hidden": "", "finetune-10/epochs": 200, "finetune-10/differs": ""})
    assert list(table.columns[0].cells) == ["finetune-10/epochs"]
