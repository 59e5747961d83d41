"""What an error message says of the names that are known, and where a warning is shown."""

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

import atoll
from atoll.core.errors import did_you_mean
from tests.data.given import pixels, small


def test_of_very_many_names_those_that_contain_the_word_are_listed():
    names = [f"vit_{size}" for size in range(90)] + ["vit_dino", "dino_small"]
    assert did_you_mean("zzz", names[:60]).count(", ") == 59
    assert did_you_mean("DINO", names) == "known: dino_small, vit_dino and 90 others"
    assert did_you_mean("zzz", names).startswith("known: dino_small, vit_0, vit_1, ")
    assert did_you_mean("zzz", names).endswith(" and 82 others")


def test_capitals_hide_no_name():
    assert did_you_mean("SSD", ["fedu", "ssd", "ssdd"]) == "did you mean 'ssd'?"


UNLABELLED = (pixels(), [-1] * 60)


@pytest.mark.parametrize(
    "warned",
    [
        lambda run: atoll.simulate(small(), run.folder / "other", data=UNLABELLED),
        lambda run: run.evaluate("geometry", data=UNLABELLED),  # through a decorator of contextlib's
        lambda run: run.embed(UNLABELLED),
    ],
    ids=["simulate", "evaluate", "embed"],
)
def test_a_warning_is_shown_at_the_line_of_the_users_code(
    tmp_path: Path, warned: Callable[[atoll.Run], object]
) -> None:
    """Notebooks showed lines of Atoll, contextlib and functools."""
    run = atoll.simulate(small(), tmp_path / "run", data=pixels())
    with pytest.warns(UserWarning, match="count as unlabelled") as caught:
        warned(run)
    lines = {(one.filename, one.lineno) for one in caught}
    assert lines == {(__file__, warned.__code__.co_firstlineno)}


def test_a_warning_of_the_same_line_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = lambda message, *_: print(message)
        for _ in range(2):
            atoll.data.objects.give_data(UNLABELLED)
        atoll.data.objects.give_data(UNLABELLED)
    assert capsys.readouterr().out.count("count as unlabelled") == 2
