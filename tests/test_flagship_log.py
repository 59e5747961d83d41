"""The log of our own method: the page is what the records say."""

from __future__ import annotations

import json

import flagship as tool

TABLE = {
    "seeds": [1],
    "recipe": "digits",
    "settings": ["train.rounds=1"],
    "tries": [
        {"name": "a", "says": "first", "settings": [], "decision": "the base"},
        {"name": "b", "base": "a", "says": "better", "settings": ["train.lr=0.2"]},
        {"name": "c", "base": "a", "says": "diverges", "settings": ["train.lr=9"]},
        {"name": "d", "base": "a", "says": "not run", "settings": []},
    ],
}


def test_the_page_is_what_the_records_say():
    text = tool.PAGE.read_text("utf-8")
    assert tool.filled(text, tool.made(tool.Log()), tool.BEGIN, tool.END) == text


def test_a_try_is_compared_with_its_base(tmp_path):
    for name, evaluation in (("a", {"probe/accuracy": 0.5}), ("b", {"probe/accuracy": 0.52}), ("c", {})):
        (tmp_path / f"{name}-seed1.json").write_text(json.dumps({"evaluation": evaluation}))
    assert list(tool.rows(tool.Log(tmp_path, TABLE))) == [
        ["`a`", "first", "50.00", "–", "1", "the base"],
        ["`b`", "better", "52.00", "+2.00 to `a`", "1", "open"],
        ["`c`", "diverges", "failed", "–", "0", "open"],
    ]


def test_a_try_changes_what_it_says_and_no_more(tmp_path):
    entries = {entry.name: entry for entry in tool.Log(tmp_path, TABLE).entries()}
    assert entries["b-seed1"].settings == ["train.rounds=1", "train.lr=0.2"]
    assert (entries["b-seed1"].recipe, entries["b-seed1"].seed) == ("digits", 1)


def test_every_base_exists_and_comes_before():
    seen = set()
    for one in tool.Log().table["tries"]:
        assert one.get("base", "base") in seen | {one["name"]}
        seen.add(one["name"])
