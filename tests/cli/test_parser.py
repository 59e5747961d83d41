"""The parser: every command has one group, a help with examples that parse, and completion."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from atoll.cli.main import main
from atoll.cli.parser import GROUPS, make_parser


def commands() -> dict[str, argparse.ArgumentParser]:
    (action,) = (one for one in make_parser()._actions if isinstance(one, argparse._SubParsersAction))
    return dict(action.choices)


def test_every_command_is_in_one_group() -> None:
    grouped = Counter(name for names in GROUPS.values() for name in names)
    assert set(grouped) == set(commands())
    assert set(grouped.values()) == {1}


def test_the_overview_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    for title, names in GROUPS.items():
        assert f"{title}:" in shown
        assert all(re.search(rf"^  {name} +\S", shown, re.MULTILINE) for name in names)


def test_an_unknown_command_or_choice_suggests_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, nearest in ((["rnu"], "run"), (["completion", "bsh"], "bash")):
        with pytest.raises(SystemExit):
            main(arguments)
        assert f"{arguments[-1]!r} is unknown; did you mean {nearest!r}?" in " ".join(
            capsys.readouterr().err.split()
        )


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        ("--rounds", "; a value of the recipe is set by --set train.rounds=VALUE\n"),
        ("--batch-size=8", "--set train.batch_size=VALUE or --set evaluation.batch_size=VALUE\n"),
        ("--name=mine", "; a value of the recipe is set by --set name=VALUE or --set method.name=VALUE\n"),
        ("--seed", "; a value of the recipe is set by --set seed=VALUE\n"),
        ("train.rounds=3", "train.rounds=3; values of a recipe stand behind --set\n"),
        ("--nothing", "--nothing\n"),
    ],
)
def test_a_recipes_value_as_an_option_names_set(
    argument: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["run", "digits-ssd", argument])
    assert capsys.readouterr().err.endswith(hint)


@pytest.mark.parametrize(
    ("command", "arguments", "end"),
    [
        ("report", ["a-run", "--out", "page.html"], "--out page.html; did you mean --output?\n"),
        ("run", ["digits", "--output", "here"], "--output here; did you mean --out?\n"),
        ("run", ["digits", "--dryrun"], "--dryrun; did you mean --dry-run?\n"),
        ("evaluate", ["a-run", "--protocol=knn", "--sets=1"], "--sets=1; did you mean --set?\n"),
        ("report", ["a-run", "--rounds", "3"], "--rounds 3\n"),
        ("federate init", ["app", "--recipe=digits", "--site=2"], "--site=2; did you mean --sites?\n"),
    ],
)
def test_an_unknown_option_is_answered_by_its_command(
    command: str, arguments: list[str], end: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only what this command has is suggested: a report has no ``--set``."""
    with pytest.raises(SystemExit):
        main([*command.split(), *arguments])
    said = capsys.readouterr().err
    assert said.startswith(f"Usage: atoll {command} ")
    assert said.endswith(f"atoll {command}: error: unrecognized arguments: {end}")


@pytest.mark.parametrize("command", ["compare", "reproduce"])
def test_a_seed_is_no_number_of_seeds(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # where three seeds would train
    with pytest.raises(SystemExit):
        main([command, "digits-ssd", "--seed", "3"])
    assert capsys.readouterr().err.endswith("a value of the recipe is set by --set seed=VALUE\n")


@pytest.mark.parametrize("name", sorted(commands()))
def test_the_examples_of_a_command_parse(name: str) -> None:
    examples = re.findall(r"^  \$ atoll (.*)$", commands()[name].format_help(), re.MULTILINE)
    for example in examples:
        if example != "completion bash > ~/.atoll-completion":
            assert make_parser().parse_args(shlex.split(example)).command.startswith(name)
    if name in ("run", "compare", "reproduce", "detect", "embed", "new"):
        assert examples


@pytest.mark.parametrize("shell", ["bash", "tcsh", "zsh"])
def test_completion_is_a_script_that_names_the_commands(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in commands())
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_every_argument_has_a_help() -> None:
    parsers = list(commands().values())
    for parser in parsers:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
            else:
                assert action.help, f"{parser.prog}: {action.option_strings or action.dest}"
