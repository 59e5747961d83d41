"""One client of five or of ten sends a hostile update in the first round, which no earlier rounds bound.

    python benchmarks/hostile_first.py        # measure; the record and the table of docs/hostile-updates.md
    python benchmarks/hostile_first.py table  # only the table, from the record

The federation is that of `hostile.py`. Client 0 sends the update in the first round, and all clients are honest in
the second. kNN is on the held-out digits after both rounds, with seeds 0, 1 and 2.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from atoll.core.tree import Weights, clone
from atoll.engines.client import train_client
from atoll.engines.federation import Federation
from atoll.engines.server import Server, TooFewUpdatesError
from atoll.recipe.recipe import load_recipe
from forged_updates import FIRST, SETTINGS, Fixed, Scene
from hostile import PAGE, knn
from measured import write
from pages import filled, markdown

RECORD = Path(__file__).parent / "results" / "hostile_first.json"
RULES: dict[str, list[str]] = {
    "fedavg": [],
    "fedavg, first_norm = 10": ["train.first_norm=10"],
    "median": ["method.aggregation=median"],
    "trimmed_mean": ["method.aggregation=trimmed_mean"],
    "multi_krum": ["method.aggregation=multi_krum"],
}
SEEDS = (0, 1, 2)


def forged(before: Weights, trained: Weights, buffers: frozenset[str]) -> dict[str, Weights]:
    """The hostile weights, from those that the client received and those that it trained."""
    own = [name for name in trained if name not in buffers]
    means = {n: t + 5e4 for n, t in trained.items() if n.endswith("running_mean")}
    return {
        "honest": {},
        "trained weights × 30": {name: 30 * trained[name] for name in own},
        "trained weights × 9": {name: 9 * trained[name] for name in own},
        "first layer filled with 40": {FIRST: torch.full_like(trained[FIRST], 40.0)},
        "step × 10": {name: before[name] + 10 * (trained[name] - before[name]) for name in own},
        "sign-flipped step × 10": {name: before[name] - 10 * (trained[name] - before[name]) for name in own},
        "means + 50,000, variances 0": {
            **means,
            **{n: torch.zeros_like(t) for n, t in trained.items() if n.endswith("running_var")},
        },
    }


def answers(federation: Federation, server: Server) -> list[Any]:
    """The honest updates of the next round."""
    client = federation.client_side(server.constants)
    return [
        clone(train_client(client, job.message, None, federation.client_data(job.client))[0])
        for job in server.jobs(server.round + 1)
    ]


def play(federation: Federation, initial: Weights, first: list[Any], settings: list[str]) -> dict[str, Any]:
    """Run the first round with given updates, and an honest second one."""
    recipe = load_recipe("digits", settings)
    server = Server(recipe, replace(federation.setting, train=recipe.train), clone(initial))
    known = {"weights", "losses", "parts", *recipe.composed.aggregation.statistics}
    found: dict[str, Any] = {"refused": []}
    for round in range(2):
        updates = clone(first) if not round else answers(federation, server)
        try:
            record = server.run_round(
                Fixed([{k: v for k, v in one.items() if k in known} for one in updates])
            )
        except TooFewUpdatesError as error:
            return {**found, "ended": str(error)}
        found["refused"].append(record.refused)
    scene = Scene(federation, server.checkpoint(), [], 0.0)
    return {**found, "knn": knn(scene, server.state["models"]["global"])}


def measure() -> dict[str, Any]:
    """Measure all updates under all rules, with each seed and each number of clients."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for clients in (5, 10):
        for seed in SEEDS:
            settings = [*SETTINGS, f"partition.clients={clients}", f"seed={seed}"]
            federation = Federation(load_recipe("digits", settings))
            initial = clone(federation.initial_weights())  # training changes the networks' own tensors
            honest = answers(federation, Server(federation.recipe, federation.setting, clone(initial)))
            for name, weights in forged(initial, honest[0]["weights"], federation.setting.buffers).items():
                own = {**honest[0], "weights": {**honest[0]["weights"], **weights}}
                rows = found.setdefault(str(clients), {}).setdefault(name, {})
                for rule, more in RULES.items():
                    first = [own, *honest[1:]]
                    rows.setdefault(rule, []).append(play(federation, initial, first, [*settings, *more]))
    return found


def _cell(plays: list[dict[str, Any]]) -> str:
    """Mean kNN, or what happened instead; each play is a seed."""
    refused = sum(bool(one["refused"] and one["refused"][0]) for one in plays)
    ended = sum("ended" in one for one in plays)
    scores = [one["knn"] for one in plays if "knn" in one]
    words = [f"{sum(scores) / len(scores):.1f}"] if scores else []
    words += ["refused" if refused == len(plays) else f"refused in {refused}"] if refused else []
    words += ["run ends" if ended == len(plays) else f"run ends in {ended}"] if ended else []
    return "; ".join(words)


def table(found: Mapping[str, Any]) -> str:
    """The table of the page."""
    rows = [
        [name, clients, *(_cell(rules[rule]) for rule in RULES)]
        for clients, updates in found["clients"].items()
        for name, rules in updates.items()
    ]
    return "\n".join(markdown(("update in round 1", "clients", *RULES), rows)).rstrip()


def page(text: str, found: Mapping[str, Any]) -> str:
    """The page with the table that is made from the record."""
    return filled(text, table(found), "<!-- hostile_first.py: first -->", "<!-- end of first -->")


def main() -> None:
    """Measure, write the record and the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", nargs="?", default="run", choices=("run", "table"))
    if parser.parse_args().command == "run":
        write(RECORD, {"seeds": list(SEEDS), "clients": measure()})
    PAGE.write_text(page(PAGE.read_text("utf-8"), json.loads(RECORD.read_text("utf-8"))), "utf-8")


if __name__ == "__main__":
    main()
