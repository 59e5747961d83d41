"""The terminal's output."""

import pytest

from atoll.cli.console import make_console


def test_a_closed_output_is_an_error_of_its_own_kind():
    """Rich would end the program with 1, and `main` ends it with 141."""
    with pytest.raises(BrokenPipeError):
        make_console().on_broken_pipe()
