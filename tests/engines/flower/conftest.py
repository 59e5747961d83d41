"""What the tests of sites share."""

from pathlib import Path

import pytest

from tests.engines.flower.deployment import write_digits


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the sites' images, where their states go too."""
    write_digits(tmp_path / "images")
    monkeypatch.setenv("ATOLL_STATE", str(tmp_path / "state"))
    return tmp_path
