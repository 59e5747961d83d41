"""Argument parser of the ``atoll`` command."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from atoll.cli import compare, lists, look, measure, sites, train
from atoll.cli.arguments import Commands, OverviewFormatter, Parser
from atoll.core.version import VERSION

GROUPS = {
    "Train": ("demo", "run", "resume", "compare", "reproduce", "bench"),
    "Measure and use": ("evaluate", "neighbours", "detect", "embed", "export", "report", "check"),
    "Look before you train": ("data", "egress", "theory"),
    "Real sites": ("federate",),
    "Write and list": ("new", "presets", "methods", "components", "schema", "completion"),
}
LIGHT = (*GROUPS["Write and list"], "federate audit")  # commands that neither train nor measure


def make_parser() -> argparse.ArgumentParser:
    """Create the parser of all commands.

    The parsed ``command`` is the command's name, ``handler`` the function that runs it, ``parser`` this parser.
    """
    parser = Parser(
        prog="atoll",
        usage="atoll COMMAND …",
        formatter_class=OverviewFormatter,
        epilog="atoll COMMAND --help explains a command. Begin with: atoll demo",
    )
    parser.add_argument("--version", action="version", version=f"atoll {VERSION}")
    commands = Commands(parser)
    for part in (train, compare, measure, look, sites, lists):
        part.add_commands(commands)
    parser.description = _overview(commands.helps)
    parser.set_defaults(parser=parser)
    return parser


def _overview(helps: Mapping[str, str]) -> str:
    """What Atoll is, and its commands by group."""
    lines = ["Federated self-supervised representation learning."]
    for title, names in GROUPS.items():
        lines += ["", f"{title}:", *(f"  {name:<12} {helps[name]}" for name in names)]
    return "\n".join(lines)
