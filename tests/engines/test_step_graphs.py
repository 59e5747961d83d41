"""Steps that are recorded and replayed: on a CPU, by simulated graphs (`tests.simulated_graphs`)."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

from atoll.components.base import VIEWS, Objective
from atoll.components.component import replays
from atoll.core.errors import UserError
from atoll.engines.step_graphs import OLDEST, Recorder, StepGraph, can_replay
from atoll.methods.registry import METHODS
from atoll.objectives.simclr import SimCLR
from tests.harness import remains, run_tiny, tiny
from tests.rounds import Rounds
from tests.simulated_graphs import Recorder as SimulatedRecorder
from tests.simulated_graphs import use_simulated_graphs
from tests.test_every_method import NEEDS
from tests.trees import same
from tests.versions import since

pytestmark = since(torch, *OLDEST, reason="takes all steps as usual")

# Three batches an epoch at each of four clients, the last of which is smaller: of nine steps, one is taken before
# the recording, and three are of small batches.
STEPS = ("data.limit=180", "train.epochs=3", "train.lr=0.01", "train.cuda_graphs=true")
NOT_ALIKE = {"fed_dino", "fed_swav", "fed_mar", "dec_mar"}  # count steps or epochs in Python


@pytest.fixture
def recorder(monkeypatch):
    return use_simulated_graphs(monkeypatch)


def own(encoder):
    """Settings of an encoder of this file."""
    encoder = f"model.encoder={__name__}:{encoder}"
    return encoder, "model.width=", "model.stem=", "data.channels=1", "views.mean=[0.5]", "views.std=[0.5]"


def recipe(name, *settings):
    return tiny(f"method.name={name}", "train.rounds=2", *NEEDS.get(name, ()), *STEPS, *settings)


def test_the_methods_that_cannot_be_replayed_are_these():
    assert {
        name for name in METHODS if not can_replay(recipe(name).composed, recipe(name).train)
    } == NOT_ALIKE


@pytest.mark.parametrize("name", ["fed_moco", "fedema", "fedu2", "featarc", "orchestra", "ssd"])
def test_replays_give_the_same_bytes(name, recorder, tmp_path):
    check_bytes(name, recorder, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(METHODS.keys() - NOT_ALIKE))
def test_replays_of_every_method_give_the_same_bytes(name, recorder, tmp_path):
    check_bytes(name, recorder, tmp_path)


def check_bytes(name, recorder, tmp_path):
    settings = (f"method.name={name}", "train.rounds=2", *NEEDS.get(name, ()), *STEPS)
    replayed = remains(run_tiny(tmp_path / "replayed", *settings))
    assert recorder.recorded > 0
    assert recorder.replayed > recorder.recorded
    plain = remains(run_tiny(tmp_path / "plain", *settings, "train.cuda_graphs=false"))
    assert same(replayed, plain)


def test_each_client_is_recorded_in_each_round_and_small_batches_are_not_replayed(recorder, tmp_path):
    run_tiny(tmp_path, "method.name=fed_simclr", "train.rounds=2", *STEPS)
    assert (recorder.recorded, recorder.replayed) == (8, 8 * 5)


def test_a_smaller_batch_between_the_first_step_and_the_recording_changes_nothing(recorder):
    """One full batch an epoch, and a smaller one after it, which draws, too."""
    sizes = ("data.limit=100", "train.epochs=6")
    weights = [
        Rounds("method.name=fedu2", *STEPS, *sizes, f"train.cuda_graphs={on}").train(0)[0]["weights"]
        for on in ("true", "false")
    ]
    assert recorder.recorded == 1
    assert same(*weights)


@dataclass(frozen=True)
class Wavering(Objective):
    """A loss that takes something from the host in some steps only."""

    name: ClassVar[str] = "wavering"
    replays: ClassVar[bool] = True

    def forwards(self):
        return VIEWS

    def loss(self, context, batch, passes):
        loss = passes[VIEWS[0]].h.square().mean()
        wanted = {"more": context.steps > 0, "fewer": context.steps == 0, "other": True}[self.name_of()]
        shape = (1 + context.steps,) if self.name_of() == "other" else (1,)
        return loss + context.from_host(lambda: torch.ones(shape)).sum() if wanted else loss

    def name_of(self):
        return type(self).__name__.lower()


class More(Wavering):
    name: ClassVar[str] = "wavering_more"


class Fewer(Wavering):
    name: ClassVar[str] = "wavering_fewer"


class Other(Wavering):
    name: ClassVar[str] = "wavering_other"


@pytest.mark.parametrize("kind", [More, Fewer, Other])
def test_a_loss_that_takes_other_tensors_from_step_to_step_is_refused(kind, recorder):
    with pytest.raises(UserError, match=r"a loss calls context.from_host differently from step to step\)"):
        Rounds(f"method.objective={__name__}:{kind.__name__}", *STEPS).train(0)


def test_losses_and_steps_are_counted_as_usual(recorder):
    replayed, plain = (
        Rounds("method.name=fed_byol", *STEPS, f"train.cuda_graphs={on}") for on in ("true", "false")
    )
    (one, _), (two, _) = replayed.train(0), plain.train(0)
    assert recorder.replayed
    assert one["losses"] == two["losses"]
    assert replayed.client.context.steps == plain.client.context.steps > 0
    assert replayed.client.context.last_epoch_loss == plain.client.context.last_epoch_loss


def test_what_is_taken_from_the_host_has_memory_of_its_own_before_the_recording(recorder, monkeypatch):
    """In a recording, memory that an earlier kernel writes is used again."""
    kept = []
    record = recorder.record
    monkeypatch.setattr(recorder, "record", lambda work: kept.append(list(graph._statics)) or record(work))
    rounds = Rounds("method.name=fedu2", *STEPS)
    graph = rounds.client.graph
    rounds.train(0)
    assert [tensor.shape[1:] for tensor in kept[0]] == [tensor.shape[1:] for tensor in graph._statics]
    assert len(kept[0]) == 6  # three sets of normal numbers for each view
    assert all(one is other for one, other in zip(kept[0], graph._statics, strict=True))


def test_few_steps_are_not_worth_a_recording(recorder):
    Rounds("method.name=fed_simclr", *STEPS, "train.epochs=1").train(0)
    assert recorder.recorded == 0


class Replacing(nn.Module):
    """An encoder that replaces a buffer in each pass."""

    output_dim = 64

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, images):
        self.calls = self.calls + 1
        return images.flatten(1) * self.scale


def test_networks_that_replace_their_buffers_are_refused(recorder):
    with pytest.raises(
        UserError, match=r"cuda_graphs: a step cannot be recorded \(a network replaces its buffers"
    ):
        Rounds("method.name=fed_simclr", *STEPS, *own("Replacing")).train(0)


@dataclass(frozen=True)
class Counting(Objective):
    """A loss that depends on a number which Python counts, and so on the step."""

    name: ClassVar[str] = "counting"
    replays: ClassVar[bool] = True

    def forwards(self):
        return VIEWS

    def start(self, context):
        context.of(self).calls = 0

    def loss(self, context, batch, passes):
        scope = context.of(self)
        scope.calls += 1
        return scope.calls * passes[VIEWS[0]].h.square().mean()


@dataclass(frozen=True)
class Honest(Counting):
    """The same, and the class says that it cannot be replayed."""

    replays: ClassVar[bool] = False


def test_the_simulation_notices_what_a_replay_would_do_wrong(recorder):
    """The red test: with a false declaration, the weights differ."""
    for kind, right in ((Counting, False), (Honest, True)):
        weights = []
        for on in ("true", "false"):
            rounds = Rounds(
                f"method.objective={kind.__module__}:{kind.__name__}", *STEPS, f"train.cuda_graphs={on}"
            )
            weights.append(rounds.train(0)[0]["weights"])
        assert same(*weights) == right


@dataclass(frozen=True)
class Own(SimCLR):
    """A subclass with a loss of its own, which declares nothing about it."""

    def loss(self, context, batch, passes):
        return super().loss(context, batch, passes)


def test_a_declaration_does_not_apply_to_hooks_that_a_subclass_overrides():
    assert replays(SimCLR)
    assert not replays(Own)


@pytest.mark.parametrize("setting", ["train.accumulate=2", "train.checkpoint_gradients=true"])
def test_parts_of_batches_and_recomputed_activations_are_not_replayed(setting, recorder, tmp_path):
    run_tiny(tmp_path, "method.name=fed_simclr", *STEPS, setting, "train.rounds=1")
    assert recorder.recorded == 0


class Dropping(nn.Sequential):
    """An encoder with dropout."""

    output_dim = 16

    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 16), nn.Dropout(0.5))


def test_networks_that_draw_random_numbers_are_not_replayed(recorder):
    Rounds("method.name=fed_simclr", *STEPS, *own("Dropping")).train(0)
    assert recorder.recorded == 0


def test_without_a_gpu_nothing_is_recorded(tmp_path):
    settings = ("method.name=fed_simclr", *STEPS)
    graphs = remains(run_tiny(tmp_path / "graphs", *settings))
    assert same(graphs, remains(run_tiny(tmp_path / "plain", *settings, "train.cuda_graphs=false")))


def test_a_step_that_cannot_be_recorded_ends_the_run_with_a_sentence(monkeypatch):
    class Refusing(SimulatedRecorder):
        def record(self, work):
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr("atoll.engines.client.step_graph", lambda *_: StepGraph(Refusing()))
    with pytest.raises(
        UserError, match=r"cuda_graphs: a step cannot be recorded \(operation not.*capturing\);"
    ):
        Rounds("method.name=fed_simclr", *STEPS).train(0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [("fedquad", "adam"), *((name, "sgd") for name in sorted(METHODS.keys() - NOT_ALIKE))],
)
def test_a_gpu_replays_to_the_same_bytes(name, optimizer, tmp_path, monkeypatch):
    replayed = []
    record = Recorder.record

    def counted(self, work):
        replayed.append(record(self, work))
        return replayed[-1]

    monkeypatch.setattr(Recorder, "record", counted)
    settings = (
        f"method.name={name}",
        "train.rounds=2",
        *NEEDS.get(name, ()),
        *STEPS,
        f"train.optimizer={optimizer}",
    )
    graphs = remains(run_tiny(tmp_path / "replayed", *settings))
    assert replayed
    assert same(graphs, remains(run_tiny(tmp_path / "plain", *settings, "train.cuda_graphs=false")))
