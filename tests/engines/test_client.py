from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import ClassVar

import numpy as np
import pytest
import torch

from atoll.aggregation.fedavg import FedAvg
from atoll.components.base import VIEWS, Forward, NumberSpec, Objective, TensorSpec, Term
from atoll.core.errors import UserError
from atoll.core.tree import leaves, pack, unpack
from atoll.engines.client import Client
from atoll.engines.federation import Federation
from tests.harness import final_models, run_tiny, tiny
from tests.rounds import Rounds

VIT = ("model.encoder=vit-tiny", "model.stem=cifar", "model.width=64", "model.depth=1", "model.patch=4")
PLAIN = ("model.projector_norm=false", "train.optimizer=sgd", "train.batch_size=16")


def step(*settings):
    """The weights after one client's round."""
    update, _ = Rounds(*settings).train(0)
    return update["weights"]


@pytest.mark.parametrize("method", ["fed_sl", "fed_pr"])  # losses that are means over samples
@pytest.mark.parametrize("parts", [2, 5])
def test_accumulated_parts_are_the_step_of_the_whole_batch(method, parts):
    settings = (f"method.name={method}", *VIT, *PLAIN)  # no BatchNorm
    whole, accumulated = step(*settings), step(*settings, f"train.accumulate={parts}")
    start = Rounds(*settings).start(0)
    for name, weight in whole.items():
        torch.testing.assert_close(accumulated[name], weight, atol=2e-6, rtol=1e-4)
    assert any(not torch.equal(weight, start[name]) for name, weight in whole.items())


def test_a_contrastive_loss_has_the_negatives_of_its_part():
    settings = ("method.name=fed_simclr", *VIT, *PLAIN)
    whole, accumulated = step(*settings), step(*settings, "train.accumulate=2")
    assert any(not torch.allclose(whole[name], accumulated[name], atol=1e-5) for name in whole)


def test_queues_and_centres_receive_all_parts():
    queued = ("method.name=fed_moco", "options.moco.queue=200", *VIT, *PLAIN, "train.lr=1e-30")
    kept = [Rounds(*queued, *more).train(0)[1]["parts"]["moco"] for more in ((), ("train.accumulate=3",))]
    sorted_ = [rows[rows[:, 0].argsort()] for rows in kept]
    torch.testing.assert_close(*sorted_, atol=1e-4, rtol=1e-3)

    centred = (
        "method.name=fed_dino",
        "options.dino.prototypes=8",
        "options.dino.local_crops=0",
        *VIT,
        *PLAIN,
    )
    kept = [
        Rounds(*centred, "train.lr=1e-30", *more).train(0)[1]["parts"]["dino"]["centre"]
        for more in ((), ("train.accumulate=2",))
    ]
    torch.testing.assert_close(*kept, atol=1e-5, rtol=1e-4)


def test_a_client_that_accumulates_counts_more_batches_and_is_accepted():
    rounds = Rounds("method.name=fed_simclr", "train.accumulate=5")
    update, _ = rounds.train(0)
    counted = update["weights"]["encoder.bn1.num_batches_tracked"]
    assert int(counted) == 2 * 5 * rounds.federation.client_data(0).num_batches()
    rounds.server.checks.names = frozenset(rounds.federation.update_names())


@pytest.mark.parametrize("method", ["fed_byol", "fed_mae"])
def test_recomputed_blocks_train_the_same_weights(method):
    settings = (f"method.name={method}", *(VIT if method == "fed_mae" else ()))
    plain, recomputed = step(*settings), step(*settings, "train.checkpoint_gradients=true")
    assert plain.keys() == recomputed.keys()
    for name, weight in plain.items():
        assert torch.equal(weight, recomputed[name]), name


def test_slices_have_the_memory_layout_of_a_message():
    """Otherwise the server's sums depend on whether a worker process sent them."""
    update, _ = Rounds("method.name=scaffold", "train.momentum=0", "engine.channels_last=true").train(0)
    sent = unpack(pack(update["parts"]))
    for here, there in zip(leaves(update["parts"]), leaves(sent), strict=True):
        assert torch.equal(here, there)
        assert here.stride() == there.stride()


@dataclass(frozen=True)
class Draws(Term):
    """Draws from PyTorch's own stream, as random layers do."""

    name: ClassVar[str] = "draws"
    source: ClassVar[str] = "a test"

    def start(self, context):
        self.drawn.append(float(torch.rand(())))

    def loss(self, context, batch, passes):
        return torch.zeros(())

    drawn: ClassVar[list[float]] = []


def test_random_layers_draw_by_the_seed_the_round_and_the_client():
    Draws.drawn[:] = []
    for seed in ("0", "1"):
        rounds = Rounds("method.name=fed_simclr", f"method.terms=['{__name__}:Draws']", f"seed={seed}")
        for client, round in ((0, 1), (1, 1), (0, 2), (0, 1)):
            torch.rand(7)
            rounds.train(client, round)
    drawn = Draws.drawn
    assert (drawn[0], drawn[4]) == (drawn[3], drawn[7])
    assert len(set(drawn)) == 6


@dataclass(frozen=True)
class Steps(Objective):
    """A loss that is the number of the steps before."""

    name: ClassVar[str] = "steps"
    source: ClassVar[str] = "a test"

    def forwards(self):
        return VIEWS

    def loss(self, context, batch, passes):
        return 0 * passes[VIEWS[0]].z.sum() + context.steps


@dataclass(frozen=True)
class Ones(Term):
    """A loss of 1 that counts half."""

    name: ClassVar[str] = "ones"
    source: ClassVar[str] = "a test"
    weight: float = 0.5
    after: ClassVar[list[int]] = []

    def loss(self, context, batch, passes):
        return torch.ones(())

    def after_step(self, context):
        self.after.append(context.steps)


def test_losses_are_means_over_all_steps_and_the_weighing_one_over_the_last_epoch():
    parts = (f"method.objective={__name__}:Steps", f"method.terms=['{__name__}:Ones']", "train.epochs=3")
    rounds = Rounds("method.name=fed_simclr", "method.aggregation=loss_weighted", *parts)
    Ones.after.clear()
    update, _ = rounds.train(0)
    batches = rounds.federation.client_data(0).num_batches()
    assert batches > 1
    steps = range(3 * batches)
    mean, last = fmean(steps), fmean(steps[-batches:])
    assert update["losses"] == pytest.approx({"steps": mean, "ones": 1.0, "loss": mean + 0.5})
    assert update["loss"] == pytest.approx(last + 0.5)
    assert Ones.after == list(range(1, 3 * batches + 1))


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_a_client_trains_at_the_rate_of_its_round(schedule):
    rounds = Rounds("method.name=fed_simclr", "train.rounds=4", "train.lr=0.5", f"train.schedule={schedule}")
    for round, cosine in ((1, 1.0), (3, 0.5), (2, (1 + 0.5**0.5) / 2)):
        rounds.start(0, round)
        expected = pytest.approx(0.5 * (cosine if schedule == "cosine" else 1))
        assert rounds.client.context.lr == expected
        assert [group["lr"] for group in rounds.client.optimizer.param_groups] == [expected]


@dataclass(frozen=True)
class Passes(Term):
    """Declares a pass whose network only the first client makes."""

    name: ClassVar[str] = "passes"
    images_of: str = "view1"

    def forwards(self):
        return (Forward(self.images_of, network="own"),)

    def start(self, context):
        if context.client == 0:
            context.frozen("own")

    def loss(self, context, batch, passes):
        return passes[self.forwards()[0]].z.square().mean()


def test_a_copy_that_another_client_made_is_not_there():
    """In one process a client's pass ran through the copy of the client before it, and in a worker it failed."""
    rounds = Rounds("method.name=fed_simclr", f"method.terms=['{__name__}:Passes']")
    rounds.train(0)
    with pytest.raises(
        UserError,
        match=r"^'passes' declares a pass through the network 'own', of which client 1 has made no copy",
    ):
        rounds.train(1)


@pytest.mark.parametrize(
    ("images", "hint"),
    [("weak", "known: image, other, view1, view2, view3$"), ("view_1", r"did you mean 'view1'\?$")],
)
def test_a_pass_of_images_that_nothing_makes_is_named(images, hint):
    settings = (f"method.terms=['{__name__}:Passes']", f"options.passes.images_of={images}")
    with pytest.raises(
        UserError,
        match=rf"^'passes' declares a pass of the images '{images}', which no inputs\(\) returns; {hint}",
    ):
        Rounds("method.name=fed_simclr", *settings).train(0)


class Spread:
    """A fold that needs all slices at once."""

    def __init__(self):
        self.slices = []

    def add(self, client, piece):
        self.slices.append(piece)

    def close(self):
        assert not any(one.requires_grad for one in self.slices)
        return torch.stack(self.slices)


@dataclass(frozen=True)
class SendsAWeight(Term):
    """Sends one of the networks' own tensors, as what it is: a parameter."""

    name: ClassVar[str] = "sends_a_weight"
    egress: ClassVar[tuple[str, ...]] = ("the last weight of the projector",)

    def declares(self, setting):
        return TensorSpec((setting.embedding_dim,))

    def fold(self, state, setting, round):
        return Spread()

    def loss(self, context, batch, passes):
        return torch.zeros(())

    def finish(self, context):
        return list(context.networks["projector"].parameters())[-1]


@dataclass(frozen=True)
class SendsANumber(Term):
    """Sends a number that numpy computed, which is a float."""

    name: ClassVar[str] = "sends_a_number"
    egress: ClassVar[tuple[str, ...]] = ("a number",)

    def declares(self, setting):
        return NumberSpec(float, least=0)

    def loss(self, context, batch, passes):
        return torch.zeros(())

    def finish(self, context):
        return np.mean([0.5, 1.0])


class Mean:
    """A fold that needs all updates at once."""

    def __init__(self, models):
        self.model = models["global"]
        self.updates = []

    def add(self, client, update, geometry):
        self.updates.append(update["weights"])

    def close(self):
        mean = {name: torch.stack([one[name] for one in self.updates]).mean(0) for name in self.updates[0]}
        return {"global": {**self.model, **mean}}


@dataclass(frozen=True)
class KeepsUpdates(FedAvg):
    """Inherits from an aggregation that keeps none."""

    name: ClassVar[str] = "keeps_updates"

    def open(self, models, setting, round, scratch):
        return Mean(models)


def test_a_fold_may_keep_the_updates_of_a_round(tmp_path):
    settings = ("train.rounds=1", "train.bn_buffers=local", "method.name=fed_simclr")
    own = run_tiny(tmp_path / "own", *settings, f"method.aggregation={__name__}:KeepsUpdates")
    usual = run_tiny(tmp_path / "usual", *settings, "options.fedavg.weights=uniform")
    expected = final_models(usual)["global"]
    for name, weight in final_models(own)["global"].items():
        torch.testing.assert_close(weight, expected[name])


def test_a_fold_may_keep_the_slices_of_a_round(tmp_path):
    """In one process the next client's training would overwrite them, which workers would hide."""
    run = run_tiny(tmp_path, "method.name=fed_simclr", f"method.terms=['{__name__}:SendsAWeight']")
    slices = run.latest()["state"]["parts"]["sends_a_weight"]
    assert len(slices) == 4
    assert not any(torch.equal(one, other) for one, other in combinations(slices, 2))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_number_of_numpys_is_a_number_in_every_process(workers, tmp_path):
    parts = (f"method.terms=['{__name__}:SendsANumber']", f"engine.workers={workers}")
    run = run_tiny(tmp_path, "method.name=fed_simclr", *parts)
    assert run.metrics[-1]["clients"] == 4


def test_a_loss_counts_a_part_by_its_share_of_the_batch():
    """Of a network without BatchNorm, and steps that change nothing."""
    settings = ("method.name=fed_sl", "train.lr=1e-12", "data.limit=72", *VIT, *PLAIN)
    whole, accumulated = (
        Rounds(*settings, f"train.accumulate={parts}").train(0)[0]["losses"] for parts in (1, 3)
    )
    assert accumulated == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("needs", [False, True])
def test_a_method_that_says_nothing_of_labels_sees_none(needs, monkeypatch):
    """Otherwise, a component that forgot `needs_labels` would train a "self-supervised" encoder on them."""
    monkeypatch.setattr(Passes, "needs_labels", needs)
    data = Federation(tiny("method.name=fed_simclr", f"method.terms=['{__name__}:Passes']")).client_data(0)
    batches = [next(data.batches(1, 1, ("view1",))), next(data.ordered())]
    assert [labels is not None for labels in (data.labels, *(batch.labels for batch in batches))] == 3 * [
        needs
    ]


def test_within_a_callers_autocast_steps_compute_with_their_own_weights(monkeypatch):
    """PyTorch keeps the converted weights until the outermost context ends: later steps used the first step's."""
    monkeypatch.setattr(Client, "autocast", lambda _: torch.autocast("cpu", torch.bfloat16))
    alone, _ = Rounds("method.name=fed_simclr").train(0)
    with torch.autocast("cpu", enabled=False):
        within, _ = Rounds("method.name=fed_simclr").train(0)
    assert within["losses"] == alone["losses"]  # of two steps; gradients of these convolutions do not repeat
