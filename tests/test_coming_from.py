"""What the pages for people who come from other libraries show of Atoll runs as it stands, in the page's order."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.cli.main import main

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(path.name for path in DOCS.glob("from-*.md"))
OURS = {"python", "toml", "console"}
THEIRS = {"py", "yaml", "bash"}


def test_the_pages_are_there() -> None:
    assert PAGES == ["from-flower.md", "from-lightly.md", "from-solo-learn.md"]


@pytest.mark.parametrize("page", PAGES)
def test_a_block_is_ours_or_theirs(page: str) -> None:
    kinds = re.findall(r"^```(\w+)$", (DOCS / page).read_text(), re.MULTILINE)
    assert set(kinds) <= OURS | THEIRS
    assert set(kinds) & OURS
    assert set(kinds) & THEIRS


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_shows_of_atoll_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    names: dict[str, Any] = {}
    text = (DOCS / page).read_text()
    for kind, block in re.findall(r"^```(\w+)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        if kind == "python":
            exec(compile(block, page, "exec"), names)
        elif kind == "toml":
            name = re.match(r"# (\S+\.toml)\n", block)
            assert name is not None, "the first line names the file"
            Path(name[1]).write_text(block)
        elif kind == "console":
            for line in block.splitlines():
                assert main(shlex.split(line.removeprefix("$ atoll "), comments=True)) == 0, line
    assert list(tmp_path.rglob("encoder.safetensors"))
