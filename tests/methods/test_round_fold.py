"""What a user's components may change in place, whatever process they run in."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from atoll.components.base import VIEWS, Aggregation, Merge, ServerStep, TensorSpec, Term
from atoll.core.run_folder import Run
from atoll.core.tree import clone, leaves, pack, unpack
from atoll.engines.client import train_client
from tests.harness import run_tiny
from tests.rounds import Rounds
from tests.trees import same


class InPlace:
    """A fold that moves the state itself."""

    def __init__(self, state):
        self.state = state

    def add(self, client, piece):
        self.state["mean"].lerp_(piece, 0.1)
        self.state["count"] += 1

    def close(self):
        return self.state


@dataclass(frozen=True)
class Centre(Term):
    """Pulls embeddings to their mean over clients."""

    name: ClassVar[str] = "centre"
    egress: ClassVar[tuple[str, ...]] = ("the mean embedding of a batch",)

    def init(self, setting):
        return {"mean": torch.ones(setting.embedding_dim), "count": 0}

    def send(self, state, client, cohort, round):
        state["mean"].mul_(0.99)
        return state

    def declares(self, setting):
        return TensorSpec((setting.embedding_dim,))

    def fold(self, state, setting, round):
        return InPlace(state)

    def forwards(self):
        return VIEWS

    def start(self, context):
        context.of(self).target = context.of(self).message["mean"].mul_(0.9)

    def loss(self, context, batch, passes):
        context.of(self).last = passes[VIEWS[0]].z.mean(0)
        return 0.1 * (context.of(self).last - context.of(self).target).square().mean()

    def finish(self, context):
        return context.of(self).last


@dataclass(frozen=True)
class Half(Merge):
    """Starts from the mean of the download and the client's last model."""

    name: ClassVar[str] = "half"
    keeps: ClassVar[tuple[str, ...]] = ("the client's model",)

    def join(self, context, downloaded):
        retained = context.of(self).retained or {}
        for name, weight in retained.items():
            downloaded[name].lerp_(weight, 0.5)
        return downloaded

    def keep(self, context):
        return dict(context.networks.named_parameters())


@dataclass(frozen=True)
class Momentum(ServerStep):
    """Momentum that is accumulated in place, and so are the weights."""

    name: ClassVar[str] = "in_place_momentum"

    def step(self, state, current, folded, setting):
        trained = [name for name in current if name not in setting.buffers]
        velocity = state or {name: torch.zeros_like(current[name]) for name in trained}
        for name in trained:
            velocity[name].mul_(0.5).add_(folded[name] - current[name])
            current[name].add_(velocity[name])
        return velocity, {**folded, **{name: current[name] for name in trained}}


@pytest.mark.parametrize("part", ["terms=['{}:Centre']", "merge={}:Half"])
def test_the_number_of_workers_decides_nothing_for_parts_that_work_in_place(part, tmp_path):
    """In one process all clients' messages hold the server's own tensors, and in a worker those of its clients."""
    settings = ("method.name=fed_simclr", "method." + part.format(__name__))
    one, two = (run_tiny(tmp_path / f"{n}", *settings, f"engine.workers={n}").latest() for n in (1, 2))
    assert same(one["state"], two["state"])


def test_a_checkpoint_that_is_still_to_be_written_holds_its_own_round(tmp_path, monkeypatch):
    """The background writes it while the next round sends, folds and steps."""
    written, save = [], Run.checkpoint

    def checkpoint(run, round, tree):
        written.append((tree["state"], clone(tree["state"])))
        save(run, round, tree)

    monkeypatch.setattr(Run, "checkpoint", checkpoint)
    parts = (f"method.terms=['{__name__}:Centre']", f"method.server={__name__}:Momentum")
    run_tiny(tmp_path / "run", "method.name=fed_simclr", *parts)
    assert len(written) == 3
    assert all(same(then, now) for then, now in written)


class Turn:
    """A fold whose state is laid out otherwise than in a file, as eigenvectors are."""

    def __init__(self, state):
        self.state = state

    def add(self, client, piece):
        self.state = [piece.T]

    def close(self):
        return self.state


@dataclass(frozen=True)
class Turned(Term):
    """Returns transposed matrices from all hooks, one of them with a graph."""

    name: ClassVar[str] = "turned"
    egress: ClassVar[tuple[str, ...]] = ("a matrix",)
    keeps: ClassVar[tuple[str, ...]] = ("a matrix",)

    def constants(self, setting, prerequisites):
        return torch.rand(3, 5).T

    def init(self, setting):
        return [torch.rand(3, 5, requires_grad=True).T]

    def send(self, state, client, cohort, round):
        return {"is": state[0], "turned": state[0].T}

    def declares(self, setting):
        return TensorSpec((5, 3))

    def fold(self, state, setting, round):
        return Turn(state)

    def loss(self, context, batch, passes):
        return torch.zeros(())

    def finish(self, context):
        return torch.rand(3, 5).T

    def keep(self, context):
        return context.of(self).message["turned"].T


@dataclass(frozen=True)
class Turning(ServerStep):
    """Returns transposed weights and a transposed state."""

    name: ClassVar[str] = "turning"

    def step(self, state, current, folded, setting):
        return [torch.rand(3, 5).T], {name: weight.T.clone().T for name, weight in folded.items()}


@pytest.mark.filterwarnings("ignore:The use of `x.T`")
def test_what_hooks_return_has_the_layout_of_a_message():
    """A product with a transposed matrix has other last bits, in one process and until a run is resumed."""
    rounds = Rounds(
        "method.name=fed_simclr", f"method.terms=['{__name__}:Turned']", f"method.server={__name__}:Turning"
    )
    first, data = rounds.server.state, rounds.federation.client_data(0)
    update, kept = train_client(rounds.client, rounds.message(0, 1), None, data)
    update["weights"] = clone(update["weights"])  # the networks' own, which an executor copies
    rounds.fold(1, {0: update})
    for tree in (rounds.server.constants, first, rounds.message(1, 2), update, kept, rounds.server.state):
        sent = unpack(pack(tree))
        for here, there in zip(leaves(tree), leaves(sent), strict=True):
            assert here.stride() == there.stride()
            assert not here.requires_grad


@dataclass(frozen=True)
class ByNorm(Aggregation):
    """Weighs each tensor of an update by the inverse of its distance."""

    name: ClassVar[str] = "by_norm"

    def open(self, models, setting, round, scratch):
        return NormFold(models["global"])


class NormFold:
    def __init__(self, current):
        self.current, self.sums, self.totals = current, dict(current), dict.fromkeys(current, 1.0)

    def add(self, client, update, geometry):
        for name in geometry.moved:
            weight = 1 / (1e-6 + float((update["weights"][name] - self.current[name]).norm()))
            self.sums[name] = self.sums[name] + weight * update["weights"][name]
            self.totals[name] += weight

    def close(self):
        return {"global": {n: s / self.totals[n] if self.totals[n] > 1 else s for n, s in self.sums.items()}}


def test_a_fold_meets_the_same_layout_whatever_process_an_update_comes_from(tmp_path):
    """A norm of a channels-last tensor has other last bits than that of its values in order."""
    settings = ("method.name=fed_simclr", f"method.aggregation={__name__}:ByNorm", "model.width=16")
    layout = "engine.channels_last=true"
    one, two = (
        run_tiny(tmp_path / f"{n}", *settings, layout, f"engine.workers={n}").latest() for n in (1, 2)
    )
    assert same(one["state"], two["state"])
