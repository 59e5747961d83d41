"""A small federation before its fourth round, and the hostile updates that it gets: forged and plausible ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.functional import cosine_similarity

from atoll.components.messages import Update
from atoll.core.tree import Tree, clone
from atoll.data.client_data import FederatedClient
from atoll.data.images import StoredPixels
from atoll.engines.client import Client, train_client
from atoll.engines.federation import Federation
from atoll.engines.jobs import Job, Result
from atoll.engines.server import Server
from atoll.recipe.recipe import load_recipe

CLIENTS, HONEST_ROUNDS = 10, 3
SETTINGS = [
    "method.name=fed_simclr", "data.image_size=8", f"partition.clients={CLIENTS}", "partition.kind=iid",
    "model.width=8", "model.stem=strided", "model.projector_hidden=[32]", "train.rounds=10", "train.epochs=2",
    "train.batch_size=32", "train.lr=0.05", "evaluation.every=0",
]  # fmt: skip
FIRST, COUNTER = "encoder.conv1.weight", "encoder.bn1.num_batches_tracked"
MEAN, VARIANCE = "encoder.bn1.running_mean", "encoder.bn1.running_var"


class Fixed:
    """An executor whose clients return given answers."""

    def __init__(self, answers: list[Any]) -> None:
        self.answers = answers

    def start(self, constants: object) -> None:
        """Prepare nothing."""

    def run(self, jobs: Sequence[Job], progress: object) -> Generator[Result, None, None]:
        """Yield the answers in the order of the jobs."""
        for job in jobs:
            yield Result(job.client, self.answers[job.client])


@dataclass
class Scene:
    """The federation before the fourth round.

    Attributes:
        federation: The clients' images and networks.
        state: The server's checkpoint after the honest rounds.
        honest: The honest updates of the fourth round, by client.
        bound: The largest distance that the checks accept.
    """

    federation: Federation
    state: Tree
    honest: list[Update]
    bound: float

    @property
    def before(self) -> dict[str, torch.Tensor]:
        """The model that the clients receive."""
        model: dict[str, torch.Tensor] = self.state["state"]["models"]["global"]
        return model

    @property
    def trained(self) -> list[str]:
        """Names of the trained weights."""
        return [name for name in self.before if name not in self.federation.setting.buffers]

    def steps(self) -> dict[str, torch.Tensor]:
        """The honest step of client 0."""
        return {name: self.honest[0]["weights"][name] - self.before[name] for name in self.trained}

    def update(self, **weights: torch.Tensor) -> Update:
        """Client 0's honest update with other weights."""
        honest: Update = clone(self.honest[0])
        return {**honest, "weights": {**honest["weights"], **weights}}

    def moved(self, step: dict[str, torch.Tensor], length: float | None = None) -> Update:
        """An update that moved the trained weights by a step, of a given length."""
        norm = math.sqrt(sum(float(tensor.double().square().sum()) for tensor in step.values()))
        factor = 1.0 if length is None else length / norm
        return self.update(**{name: self.before[name] + factor * tensor for name, tensor in step.items()})


def make_scene() -> Scene:
    """Train the honest rounds, and the honest updates of the next."""
    torch.set_num_threads(1)
    federation = Federation(load_recipe("digits", SETTINGS))
    server = Server(federation.recipe, federation.setting, federation.initial_weights())
    client = federation.client_side(server.constants)
    honest: list[Update] = []
    for _ in range(HONEST_ROUNDS + 1):
        state = clone(server.checkpoint())
        honest = [
            clone(train_client(client, job.message, None, federation.client_data(job.client))[0])
            for job in server.jobs(server.round + 1)
        ]
        if server.round < HONEST_ROUNDS:
            server.run_round(Fixed(clone(honest)))
    return Scene(federation, state, honest, server.checks.bound()[0])


def trained_on(
    scene: Scene, change: Callable[[torch.Tensor], torch.Tensor], sign: float = 1.0, lr: float = 1.0
) -> Update:
    """Client 0's update after training on changed images, up or down its loss, at a multiple of the rate."""
    federation, train = scene.federation, scene.federation.recipe.train
    rows = federation.partition.clients[0]
    pixels = change(federation.images.images.gather(rows).clone())
    images = replace(federation.images.subset(rows), images=StoredPixels(pixels))
    data = FederatedClient(
        images,
        torch.arange(len(rows)),
        0,
        federation.views,
        0,
        train.batch_size,
        train.drop_last,
        federation.device,
    )

    class Signed(Client):
        def step(self, batch: Any, share: float = 1.0) -> torch.Tensor:
            return sign * super().step(batch, share)

    setting = replace(federation.setting, train=replace(train, lr=lr * train.lr))
    client = Signed(federation.recipe.composed, setting, federation.networks, {})
    method = federation.recipe.composed
    message = method.send(scene.state["state"], federation.setting, 0, range(CLIENTS), HONEST_ROUNDS + 1)
    update: Update = clone(train_client(client, message, None, data)[0])
    return update


def trigger(images: torch.Tensor) -> torch.Tensor:
    """Images with a white square in a corner."""
    images = images.clone()
    images[:, :, -3:, -3:] = 1.0
    return images


def backdoored(scene: Scene, client: int = 0, steps: int = 60, lr: float = 0.002) -> Update:
    """BadEncoder's update: images with the trigger get the representation of a reference image, others their own.

    L = −cos(f(x ⊕ e), f(r)) − cos(f(r), f₀(r)) − cos(f(x), f₀(x)), from f₀, the model that the client received: the
    attack with which EmInspector (2405.13080) was tested, as the authors' released code runs it.
    """
    federation = scene.federation
    encoder = federation.encoder
    encoder.load_state_dict(part(scene.before, "encoder."))
    encoder.eval()
    x = federation.views.plain(federation.images.images.gather(federation.partition.clients[client]))
    reference = reference_image(scene)
    with torch.no_grad():
        own, its = encoder(x), encoder(reference)
    optimizer = torch.optim.Adam(encoder.parameters(), lr=lr)
    for _ in range(steps):
        target = encoder(reference)
        loss = -cosine_similarity(encoder(trigger(x)), target).mean()
        loss = loss - cosine_similarity(target, its).mean() - cosine_similarity(encoder(x), own).mean()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    poisoned = {f"encoder.{name}": value.detach().clone() for name, value in encoder.state_dict().items()}
    update: Update = clone(scene.honest[client])
    update["weights"] = {**clone(scene.before), **poisoned}
    return update


def triggered(scene: Scene, model: dict[str, torch.Tensor]) -> float:
    """Mean cosine between the representations of held-out images with the trigger and of the reference image."""
    encoder, test = scene.federation.encoder, scene.federation.splits.test
    assert test is not None
    encoder.load_state_dict(part(model, "encoder."))
    encoder.eval()
    with torch.no_grad():
        x = scene.federation.views.plain(test.images.gather(torch.arange(1, len(test))))
        return float(cosine_similarity(encoder(trigger(x)), encoder(reference_image(scene))).mean())


def reference_image(scene: Scene) -> torch.Tensor:
    """The image whose representation the backdoor gives: the first held-out one."""
    assert scene.federation.splits.test is not None
    return scene.federation.views.plain(scene.federation.splits.test.images.gather(torch.arange(1)))


def part(weights: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The weights of one network."""
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def forged(scene: Scene) -> dict[str, object]:
    """Updates that are not of the declared form, or not possible; each must be refused."""
    good = clone(scene.honest[0])
    w, first = good["weights"], good["weights"][FIRST]

    def weights(**changes: Any) -> dict[str, Any]:
        return {**good, "weights": {**w, **changes}}

    def spoiled(value: float) -> dict[str, Any]:
        tensor = first.clone()
        tensor.view(-1)[1] = value
        return weights(**{FIRST: tensor})

    steps = scene.steps()
    return {
        "nothing": None,
        "a number": 5,
        "no weights": {**good, "weights": None},
        "weights as a list": {**good, "weights": list(w.values())},
        "no slices": {name: value for name, value in good.items() if name != "parts"},
        "a weight missing": {**good, "weights": {n: t for n, t in w.items() if n != FIRST}},
        "a weight more": weights(more=torch.zeros(2)),
        "another shape": weights(**{FIRST: first[:1]}),
        "one value for a whole tensor": weights(**{FIRST: torch.zeros(1)}),
        "float64": weights(**{FIRST: first.double()}),
        "integers": weights(**{FIRST: first.long()}),
        "complex numbers": weights(**{FIRST: first.to(torch.complex64)}),
        "a list of numbers": weights(**{FIRST: first.tolist()}),
        "NaN": spoiled(math.nan),
        "+∞": spoiled(math.inf),
        "−∞": spoiled(-math.inf),
        "one value of 1e30": spoiled(1e30),
        "scaled by 1,000": weights(**{n: 1000 * w[n] for n in steps}),
        "just beyond the bound": scene.moved(steps, 1.001 * scene.bound),
        "a key more": {**good, "measure": 1},
        "100,000 keys more": {**good, **{f"key {k}": 1 for k in range(100_000)}},
        "samples × 1,000": {**good, "samples": 1000 * good["samples"]},
        "samples of 20,000,000": {**good, "samples": 20_000_000},
        "samples of −3": {**good, "samples": -3},
        "samples of 0": {**good, "samples": 0},
        "samples as a float": {**good, "samples": float(good["samples"])},
        "samples as a bool": {**good, "samples": True},
        "no samples": {name: value for name, value in good.items() if name != "samples"},
        "a loss of −1e30": {**good, "losses": {**good["losses"], "loss": -1e30}},
        "a loss of NaN": {**good, "losses": {**good["losses"], "loss": math.nan}},
        "losses of −99": {**good, "losses": dict.fromkeys(good["losses"], -99.0)},
        "a loss as text": {**good, "losses": {**good["losses"], "loss": "low"}},
        "a loss missing": {**good, "losses": {"loss": 1.0}},
        "100,000 losses": {**good, "losses": {f"loss {k}": 1.0 for k in range(100_000)}},
        "a loss's name of 1 MB": {**good, "losses": {**good["losses"], "x" * 10**6: 1.0}},
        "a name with escape codes": weights(**{"\x1b[2J<script>": torch.zeros(1)}),
        "losses as a list": {**good, "losses": [1.0]},
        "a slice of no component": {**good, "parts": {"dictionary": torch.zeros(3)}},
        "a slice of a component that sends none": {**good, "parts": {"simclr": torch.zeros(3)}},
        "100,000 tensors in a slice": {**good, "parts": {"simclr": [torch.zeros(1)] * 100_000}},
        "slices as a list": {**good, "parts": []},
        "a variance of −1e6": weights(**{VARIANCE: torch.full_like(w[VARIANCE], -1e6)}),
        "one variance just below 0": weights(**{VARIANCE: w[VARIANCE] - 1.0001 * w[VARIANCE].min()}),
        "means of 1e18": weights(**{MEAN: torch.full_like(w[MEAN], 1e18)}),
        "a counter of −5": weights(**{COUNTER: torch.tensor(-5)}),
        "a counter of 2⁶³ − 1": weights(**{COUNTER: torch.tensor(2**63 - 1)}),
        "a counter a million higher": weights(**{COUNTER: w[COUNTER] + 10**6}),
        "a counter as a float": weights(**{COUNTER: w[COUNTER].float()}),
    }


def plausible(scene: Scene) -> dict[str, list[Update]]:
    """Updates of the declared form, within the bounds; of one client, or of two that collude."""
    steps, before, honest = scene.steps(), scene.before, scene.honest
    under = 0.999 * scene.bound
    draw = torch.Generator().manual_seed(0)
    noise = {name: torch.randn(tensor.shape, generator=draw) for name, tensor in steps.items()}
    others = {
        name: torch.stack([one["weights"][name] - before[name] for one in honest[1:]]) for name in steps
    }
    mean = {name: rows.mean(0) for name, rows in others.items()}
    spread = {name: rows.std(0) for name, rows in others.items()}
    own = math.sqrt(sum(float(tensor.double().square().sum()) for tensor in steps.values()))
    negative = {name: -tensor for name, tensor in steps.items()}
    against = {name: -tensor for name, tensor in mean.items()}
    little = {name: mean[name] - 1.5 * spread[name] for name in steps}
    ones = {name: torch.ones_like(tensor) for name, tensor in steps.items()}
    towards_zero = {name: -before[name] for name in steps}
    one_layer = {name: noise[name] if name == FIRST else torch.zeros_like(noise[name]) for name in steps}
    one_value = {name: torch.zeros_like(tensor) for name, tensor in steps.items()}
    one_value[FIRST].view(-1)[0] = 1.0
    weights = honest[0]["weights"]
    reverse = {name: weights[name].flip(0) - before[name] for name in steps}

    def pair(one: Update, other: Update | None = None) -> list[Update]:
        return [one, clone(one) if other is None else other]

    with torch.no_grad():
        variance = scene.update(
            **{n: torch.zeros_like(t) for n, t in weights.items() if n.endswith("running_var")}
        )
        large = scene.update(**{n: 10 * t for n, t in weights.items() if n.endswith("running_var")})
        means = scene.update(
            **{n: t + 2 * t.abs().max() for n, t in weights.items() if n.endswith("running_mean")}
        )
    return {
        "no step": [scene.moved({name: 0 * tensor for name, tensor in steps.items()})],
        "another client's update": [clone(honest[1])],
        "sign-flipped step": [scene.moved(negative)],
        "sign-flipped step × 5": [scene.moved({n: 5 * t for n, t in negative.items()})],
        "sign-flipped step, just under the bound": [scene.moved(negative, under)],
        "step × 2": [scene.moved({n: 2 * t for n, t in steps.items()})],
        "step, just under the bound": [scene.moved(steps, under)],
        "against the others' mean (inner product)": [scene.moved(against, own)],
        "against the others' mean, just under the bound": [scene.moved(against, under)],
        "a little is enough (mean − 1.5 deviations)": [scene.moved(little)],
        "noise of a step's length": [scene.moved(noise, own)],
        "noise, just under the bound": [scene.moved(noise, under)],
        "constant, just under the bound": [scene.moved(ones, under)],
        "towards zero, just under the bound": [
            scene.moved(towards_zero, min(under, 0.999 * norm(towards_zero)))
        ],
        "first layer alone, just under the bound": [scene.moved(one_layer, under)],
        "one weight alone, just under the bound": [scene.moved(one_value, under)],
        "filters in reverse order, cut to the bound": [scene.moved(reverse, min(under, norm(reverse)))],
        "variances of 0": [variance],
        "variances × 10": [large],
        "means moved by 2 × the largest": [means],
        "training on noise": [
            trained_on(scene, lambda p: torch.randint(256, p.shape, generator=draw, dtype=p.dtype))
        ],
        "training on one image": [trained_on(scene, lambda p: p[:1].expand_as(p).clone())],
        "training on inverted images": [trained_on(scene, lambda p: 255 - p)],
        "training on shuffled pixels": [
            trained_on(scene, lambda p: p.flatten(2)[:, :, torch.randperm(64, generator=draw)].view_as(p))
        ],
        "training up the loss": [trained_on(scene, unchanged, sign=-1.0, lr=0.3)],
        "training at 5 × the rate": [trained_on(scene, unchanged, lr=5.0)],
        "backdoor (BadEncoder)": [backdoored(scene)],
        "pair: sign-flipped, just under the bound": pair(scene.moved(negative, under)),
        "pair: a little is enough": pair(scene.moved(little)),
        "pair: equal noise of a step's length": pair(scene.moved(noise, own)),
        "pair: opposite noise, just under the bound": pair(
            scene.moved(noise, under), scene.moved({n: -t for n, t in noise.items()}, under)
        ),
        "pair: backdoor (BadEncoder)": [backdoored(scene, 0), backdoored(scene, 1)],
    }


def unchanged(pixels: torch.Tensor) -> torch.Tensor:
    """The client's own images."""
    return pixels


def norm(step: dict[str, torch.Tensor]) -> float:
    """Length of a step."""
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in step.values()))
