"""One of ten clients sends a hostile update: what is refused, and what the rest do to the model.

    python benchmarks/hostile.py        # measure; the record and the tables of docs/hostile-updates.md
    python benchmarks/hostile.py table  # only the tables, from the record

Ten clients with equal shares of scikit-learn's digits train three honest rounds. In the fourth, client 0 (for pairs
client 1 too) sends each hostile update in turn, with everything else the same, under each rule behind the checks.
`distance` is ‖w − w*‖ / ‖w* − v‖, over the trained weights: w* is the model of the same rule when all are honest,
and v the model before the round; 1 is a whole round's progress. kNN (k = 20, cosine) is on the held-out digits.
One seed and one round: differences of a point or two say nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from sklearn.neighbors import KNeighborsClassifier
from torch.nn.functional import normalize

from atoll.core.tree import clone
from atoll.engines.server import Server
from atoll.recipe.recipe import load_recipe
from forged_updates import (
    SETTINGS,
    Fixed,
    Scene,
    backdoored,
    forged,
    make_scene,
    norm,
    part,
    plausible,
    triggered,
)
from measured import write
from pages import filled, markdown

RECORD = Path(__file__).parent / "results" / "hostile.json"
PAGE = Path(__file__).parents[1] / "docs" / "hostile-updates.md"
RULES = ("fedavg", "median", "trimmed_mean", "multi_krum", "em_inspector")


def play(scene: Scene, rule: str, hostile: list[Any]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Run the fourth round; return the next model and the refused clients with the reasons."""
    more = [] if rule == "fedavg" else [f"method.aggregation={rule}"]
    more += ["options.em_inspector.data={source='digits'}"] if rule == "em_inspector" else []
    recipe = load_recipe("digits", [*SETTINGS, *more])
    server = Server(recipe, scene.federation.setting, scene.before)
    server.restore(clone(scene.state))
    known = {"weights", "losses", "parts", *recipe.composed.aggregation.statistics}
    honest = [{k: v for k, v in one.items() if k in known} for one in clone(scene.honest[len(hostile) :])]
    if rule != "fedavg":  # forged updates are tried under FedAvg alone
        hostile = [{k: v for k, v in one.items() if k in known} for one in hostile]
    answers: list[Any] = [*hostile, *honest]
    record = server.run_round(Fixed(answers))
    return server.state["models"]["global"], record.refused


def knn(scene: Scene, model: dict[str, torch.Tensor]) -> float:
    """Accuracy in percent of the nearest neighbours of the held-out images."""
    encoder, splits = scene.federation.encoder, scene.federation.splits
    encoder.load_state_dict(part(model, "encoder."))
    encoder.eval()
    h, y = [], []
    assert splits.test is not None
    for images in (splits.train, splits.test):
        with torch.no_grad():
            rows = scene.federation.views.plain(images.images.gather(torch.arange(len(images))))
            h.append(normalize(encoder(rows).double().nan_to_num(0, 0, 0), dim=1).numpy())
        y.append(images.labels)
    return float(100 * KNeighborsClassifier(20).fit(h[0], y[0]).score(h[1], y[1]))


def measure(scene: Scene) -> dict[str, Any]:
    """Measure all updates under all rules."""
    found: dict[str, Any] = {"refused": {}, "honest": {}, "accepted": {}}
    for name, update in forged(scene).items():
        _, refused = play(scene, "fedavg", [update])
        found["refused"][name] = refused.get("0")
    updates = plausible(scene)
    for rule in RULES:
        honest, _ = play(scene, rule, [])
        length = norm({name: honest[name] - scene.before[name] for name in scene.trained})
        found["honest"][rule] = {"knn": knn(scene, honest)}
        for name, hostile in updates.items():
            model, refused = play(scene, rule, clone(hostile))
            distance = norm({n: model[n] - honest[n] for n in scene.trained}) / length
            row = {"distance": distance, "knn": knn(scene, model), "refused": len(refused)}
            found["accepted"].setdefault(name, {})[rule] = row
    found["before"] = knn(scene, scene.before)
    backdoors = [backdoored(scene, client) for client in range(4)]
    found["backdoors"] = {
        str(count): {rule: triggered(scene, play(scene, rule, clone(backdoors[:count]))[0]) for rule in RULES}
        for count in range(len(backdoors) + 1)
    }
    return found


def accepted(found: Mapping[str, Any]) -> str:
    """The table of the accepted updates."""
    rows = [["all honest", *(f"0; {found['honest'][rule]['knn']:.1f}" for rule in RULES)]]
    for name, row in found["accepted"].items():
        cells = (
            "refused" if row[rule]["refused"] else f"{row[rule]['distance']:.2f}; {row[rule]['knn']:.1f}"
            for rule in RULES
        )
        rows.append([name, *cells])
    before = f"Before the round, kNN is {found['before']:.1f}."
    return "\n".join([before, "", *markdown(("update", *RULES), rows)]).rstrip()


def refused(found: Mapping[str, Any]) -> str:
    """The list of the updates that are not of the declared form, or not possible."""
    names, passed = list(found["refused"]), [name for name, why in found["refused"].items() if why is None]
    said = f"All {len(names)} are refused" if not passed else f"NOT refused: {', '.join(passed)}"
    return f"{said}: {'; '.join(names)}."


def backdoors(found: Mapping[str, Any]) -> str:
    """The table of the backdoors."""
    rows = [
        [count, *(f"{cosines[rule]:.2f}" for rule in RULES)] for count, cosines in found["backdoors"].items()
    ]
    return "\n".join(markdown(("attackers of ten", *RULES), rows)).rstrip()


PARTS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "refused": refused,
    "accepted": accepted,
    "backdoors": backdoors,
}


def page(text: str, found: Mapping[str, Any]) -> str:
    """The page with the parts that are made from the record."""
    for name, made in PARTS.items():
        text = filled(text, made(found), f"<!-- hostile.py: {name} -->", f"<!-- end of {name} -->")
    return text


def main() -> None:
    """Measure, write the record and the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", nargs="?", default="run", choices=("run", "table"))
    if parser.parse_args().command == "run":
        write(RECORD, {"seed": 0, **measure(make_scene())})
    PAGE.write_text(page(PAGE.read_text("utf-8"), json.loads(RECORD.read_text("utf-8"))), "utf-8")


if __name__ == "__main__":
    main()
