from __future__ import annotations

import sys
from pathlib import Path

import pytest

from atoll.core.errors import UserError
from atoll.core.extras import missing, require


def test_a_folder_that_is_called_like_a_library_is_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python imports any folder beside a script as a package without content."""
    (tmp_path / "no_such_tool").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    sentence = missing("no_such_tool", "tool", "--log tool")
    assert sentence is not None
    with pytest.raises(UserError) as found:
        require("no_such_tool", "tool", "--log tool")
    assert str(found.value) == sentence
    (tmp_path / "no_such_tool" / "__init__.py").write_text("here = True")
    monkeypatch.delitem(sys.modules, "no_such_tool", raising=False)
    assert missing("no_such_tool", "tool", "--log tool") is None
    assert require("no_such_tool", "tool", "--log tool").here
