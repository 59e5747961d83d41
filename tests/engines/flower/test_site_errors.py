"""What a coordinator reads of an error at a site, and what stays there."""

import importlib
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the extra atoll[flower] is not installed")

from atoll.core.errors import RunError, UserError
from atoll.core.tree import load
from atoll.data.dicom import read_dicom
from atoll.data.options import DataOptions
from atoll.data.sources import load_data
from atoll.engines.flower.site_errors import (
    FILES,
    IMAGES,
    LIBRARY,
    OTHER,
    SiteError,
    details_of,
    sentence_of,
)
from atoll.engines.flower.site_options import SiteOptions

SECRET = "/home/drsmith/ward7"


def raised(action):
    """The error of an action."""
    try:
        action()
    except Exception as error:
        return error
    raise AssertionError


def read_policy():
    SiteOptions(site="north", policy=f"{SECRET}/policy.toml").read_policy()


def fail(error):
    raise error


@pytest.mark.parametrize(
    ("action", "sentence"),
    [
        (
            read_policy,
            "the site's policy cannot be read; the site's own log says why, and its owner corrects",
        ),
        (lambda: load(Path(SECRET)), FILES),
        (lambda: load_data(DataOptions(source="images", path=SECRET), 0), IMAGES),
        (lambda: fail(UserError(f"cannot import name 'x' ({SECRET})")), OTHER),
        (lambda: fail(RunError(SECRET)), OTHER),
        (lambda: fail(ValueError(SECRET)), OTHER),
        (lambda: fail(OSError(28, "No space left", SECRET)), "OSError at the site, whose own log has the"),
    ],
)
def test_the_coordinator_reads_what_failed_and_the_site_alone_where(action, sentence):
    error = raised(action)
    told = sentence_of(error, at_site=True)
    assert told.startswith(sentence)
    assert "drsmith" not in told
    assert "drsmith" in details_of(error)


def test_a_missing_library_is_named_at_the_site_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydicom", None)
    error = raised(lambda: read_dicom(b""))
    assert sentence_of(error, at_site=True) == LIBRARY
    assert "pydicom" in details_of(error)


def test_sentences_for_the_coordinator_reach_it():
    assert sentence_of(SiteError("the site has withdrawn"), at_site=True) == "the site has withdrawn"


def test_where_the_coordinator_has_the_images_itself_it_reads_everything():
    assert sentence_of(UserError(SECRET), at_site=False) == SECRET
    assert sentence_of(KeyError("x"), at_site=False) == "KeyError: 'x'"


def test_an_error_in_the_users_code_is_placed_in_a_simulation_and_not_at_a_site():
    with pytest.raises(ModuleNotFoundError) as raised:
        importlib.import_module("nowhere_at_all")
    told = sentence_of(raised.value, at_site=False)
    assert re.fullmatch(
        r"ModuleNotFoundError: No module named 'nowhere_at_all' \(.*test_site_errors\.py, line \d+\)", told
    )
    assert __file__ not in sentence_of(raised.value, at_site=True)
