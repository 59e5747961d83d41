"""Environment variables within a context."""

import os
import subprocess
import sys

import pytest

from atoll.core.variables import environment_variables

SHOW = "import os; print(os.environ['ATOLL_ONE'], os.environ['ATOLL_TWO'])"


def test_a_child_process_reads_them_and_the_earlier_values_return(monkeypatch):
    monkeypatch.setenv("ATOLL_ONE", "before")
    monkeypatch.delenv("ATOLL_TWO", raising=False)
    before = dict(os.environ)
    with environment_variables({"ATOLL_ONE": "1", "ATOLL_TWO": "2"}):
        shown = subprocess.run([sys.executable, "-c", SHOW], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["1", "2"]
    assert dict(os.environ) == before


@environment_variables({"ATOLL_ONE": "1"})
def change_another_and_fail():
    os.environ["ATOLL_OTHER"] = os.environ["ATOLL_ONE"]
    raise KeyError


def test_they_return_after_an_error_and_others_keep_their_change(monkeypatch):
    monkeypatch.setenv("ATOLL_ONE", "before")
    monkeypatch.setenv("ATOLL_OTHER", "before")
    with pytest.raises(KeyError):
        change_another_and_fail()
    assert (os.environ["ATOLL_ONE"], os.environ["ATOLL_OTHER"]) == ("before", "1")
