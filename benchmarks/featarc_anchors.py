"""FeatARC's anchors and gradients, at the initial model and at a model that FedSimCLR has trained.

    atoll run cifar10-table --set method.name=fed_simclr train.rounds=5 seed=17 --out runs/simclr
    python benchmarks/featarc_anchors.py runs/simclr --data DIR

The model of a client is also the downloaded one, as in a first step. Prints, as means over clients 0 to 2:
the mean cosine of two anchors (first 300 images), and for one batch the regulariser's gradient with λ = 1, by the
encoder's weights: its norm over that of SimCLR's gradient, and the cosine of the two.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from torch.nn.functional import cosine_similarity, normalize

import atoll
from atoll.components.base import run_forwards
from atoll.components.messages import Message
from atoll.core.run_folder import Run
from atoll.core.tree import Weights
from atoll.engines.federation import Federation

CLIENTS, IMAGES = (0, 1, 2), 300


def measure(reading: str, seed: int, weights: Weights) -> list[float]:
    """Measure one reading of the regulariser at a model; without weights, at the initial one."""
    settings = ["method.name=featarc_align", f"options.featarc_alignment.reading={reading}", f"seed={seed}"]
    federation = Federation(atoll.load_recipe("cifar10-table", settings))
    model = {**federation.initial_weights(), **weights}
    side, found = federation.client_side({}), []
    for client in CLIENTS:
        data = federation.client_data(client)
        message: Message = {
            "client": client,
            "round": 1,
            "models": {"global": model},
            "parts": {},
            "epochs": 1,
            "kept": 0,
        }
        side.start(message, None, data)
        anchors = normalize(side.context.of(side.method.terms[0]).anchors[:IMAGES])
        others = len(anchors) * (len(anchors) - 1)
        batch = next(data.batches(1, 1, side.method.images))
        networks = {"local": side.networks, **side.copies}
        passes = run_forwards(side.method.forwards, networks, batch.images, False, side.context.after)
        parameters, gradients = list(side.networks["encoder"].parameters()), []
        for _, component in side.method.losses:
            loss = component.loss(side.context, batch, passes)
            parts = torch.autograd.grad(loss, parameters, retain_graph=True)
            gradients.append(torch.cat([part.flatten() for part in parts]))
        ssl, align = gradients
        mean_cosine = ((anchors @ anchors.T).sum() - len(anchors)) / others
        found.append(
            torch.stack([mean_cosine, align.norm() / ssl.norm(), cosine_similarity(ssl, align, dim=0)])
        )
    return [float(value) for value in torch.stack(found).mean(0)]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="folder of a run of FedSimCLR")
    parser.add_argument("--data", help="folder of the data, as ATOLL_DATA")
    parser.add_argument("--seed", type=int, default=17)
    asked = parser.parse_args()
    if asked.data:
        os.environ["ATOLL_DATA"] = asked.data
    torch.set_num_threads(1)
    newest = Run(asked.run).latest()
    assert newest is not None, f"{asked.run} has no complete round"
    (trained,) = newest["state"]["models"].values()
    print("| reading | model | cosine of anchors | norm of the gradient | cosine of the gradients |")
    print("| --- | --- | ---: | ---: | ---: |")
    for reading in ("code", "paper"):
        for name, weights in (("initial", {}), (f"round {newest['line']['round']}", trained)):
            numbers = " | ".join(f"{value:.2f}" for value in measure(reading, asked.seed, weights))
            print(f"| `{reading}` | {name} | {numbers} |")


if __name__ == "__main__":
    main()
