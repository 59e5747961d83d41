"""Clients that train together against clients that train one by one."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import nn

import atoll
from atoll.components.base import Forward, Objective, TensorSpec, Term, Trained
from atoll.core.errors import UserError
from atoll.core.tree import leaves
from atoll.data.views.views import Views
from atoll.engines.client_states import ClientStates
from atoll.engines.executors import InProcess
from atoll.engines.federation import Federation
from atoll.engines.server import Server
from atoll.engines.stacked import Stacked
from atoll.methods.registry import METHODS as CATALOGUE
from atoll.recipe.recipe import give
from tests.harness import remains, run_tiny, tiny
from tests.test_every_method import NEEDS
from tests.trees import same

# Attention on a CPU has no stacked kernel, which PyTorch says once.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")

# Clients of 13 to 74 images: epochs end at different steps, and with smaller batches.
UNEQUAL = ("partition.kind=dirichlet", "partition.alpha=0.5", "train.epochs=2", "train.lr=0.001")
METHODS = {
    "one network": ("method.name=ssd",),
    "momentum network": ("method.name=fed_byol", "train.lr=0.0001"),
    "kept model": ("method.name=moon",),
    "kept queue": ("method.name=fed_moco", "options.moco.queue=64"),
    "kept variates": ("method.name=scaffold", "train.momentum=0"),
    "loss of the last epoch": ("method.name=fed_loss", "train.lr=0.0001"),
    "term on the weights": ("method.name=fedprox",),
    "tuples": ("method.name=fedquad", "options.fedquad.redraw=true"),
    "joint views": ("method.name=fed_simclr", "train.views_batch=joint"),
    "kept statistics": ("method.name=fed_simclr", "train.bn_buffers=local", "train.keep_optimizer=true"),
    "personal weights": ("method.name=fed_simclr", "method.share=['encoder.*']"),
    "attention and adapters": ("method.name=fed_simclr", "model.encoder=vit-tiny", "model.width=64",
                                "model.depth=1", "model.stem=cifar", "model.lora_rank=2",
                                "model.lora_targets=['*.mlp.*']"),
}  # fmt: skip


@pytest.fixture
def precise(monkeypatch):
    """Networks and images are float64, in which rounding cannot be mistaken for anything else."""

    def in_float32(make):
        def made(*arguments):
            torch.set_default_dtype(torch.float32)
            views = make(*arguments)
            torch.set_default_dtype(torch.float64)
            return [view.double() for view in views] if isinstance(views, list) else views.double()

        return made

    monkeypatch.setattr(Views, "make", in_float32(Views.make))
    monkeypatch.setattr(Views, "plain", in_float32(Views.plain))
    monkeypatch.setattr(TensorSpec, "form_mismatch", lambda *_: None)  # slices are declared as float32
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def rounds_of(executor_class, folder, settings, dropout=False, count=2, encoder=None):
    """The server's state, its records, what clients keep, and the images of each step, after some rounds."""
    federation = Federation(tiny(*settings) if encoder is None else give(tiny(*settings), encoder=encoder))
    if dropout:
        federation.networks["projector"].append(nn.Dropout(0.5))
    initial = federation.initial_weights()
    trained = Trained(federation.initial_weights(), federation.splits.test.images)
    needed = dict.fromkeys(federation.recipe.composed.prerequisites(), trained)
    server = Server(federation.recipe, federation.setting, initial, needed)
    states = ClientStates(folder)
    executor = executor_class(federation, states)
    executor.start(server.constants)
    images = []
    records = [server.run_round(executor, images.append) for _ in range(count)]
    setting, keeps = federation.setting, federation.recipe.composed.keeps
    # With a part of the clients in a round, some have no state of the last one.
    whole = keeps and setting.cohort_size == setting.num_clients
    kept = [states.load(client, count) for client in range(setting.num_clients)] if whole else []
    return server.checkpoint(), records, kept, images


def close(tree, other):
    pairs = list(zip(leaves(tree), leaves(other), strict=True))
    assert pairs
    for tensor, expected in pairs:
        assert tensor.dtype == expected.dtype
        torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.usefixtures("precise")
@pytest.mark.parametrize("settings", METHODS.values(), ids=METHODS)
def test_together_is_one_by_one_up_to_rounding(settings, tmp_path):
    settings = (*UNEQUAL, *settings)
    expected, plain_records, plain_kept, plain_images = rounds_of(InProcess, tmp_path / "alone", settings)
    for stack in (4, 3):
        state, records, kept, images = rounds_of(
            Stacked, tmp_path / f"together-{stack}", (*settings, f"engine.stack={stack}")
        )
        close(state, expected)
        if plain_kept:
            close(kept, plain_kept)
        for record, plain in zip(records, plain_records, strict=True):
            assert record.losses == pytest.approx(plain.losses, rel=1e-6)
            assert record.clients == plain.clients == 4
        assert sorted(images) == sorted(plain_images)


@pytest.mark.slow
@pytest.mark.usefixtures("precise")
@pytest.mark.parametrize("name", sorted(CATALOGUE))
def test_each_method_trains_together_as_one_by_one(name, tmp_path):
    settings = (f"method.name={name}", *NEEDS.get(name, ()), "train.lr=0.0001")
    together = rounds_of(Stacked, tmp_path / "together", (*settings, "engine.stack=3"))
    close(together[0], rounds_of(InProcess, tmp_path / "alone", settings)[0])


@pytest.mark.usefixtures("precise")
def test_random_layers_of_heads_draw_what_they_draw_alone(tmp_path):
    settings = (*UNEQUAL, "method.name=fed_simclr")
    together = rounds_of(Stacked, tmp_path / "together", (*settings, "engine.stack=4"), dropout=True)
    alone = rounds_of(InProcess, tmp_path / "alone", settings, dropout=True)
    close(together[0], alone[0])


def updates_of(executor_class, folder, settings, groups, partition=None):
    """The updates of the clients of the last group; each group starts from the first models."""
    federation = Federation(tiny(*settings), partition=partition)
    server = Server(federation.recipe, federation.setting, federation.initial_weights())
    executor = executor_class(federation, ClientStates(folder))
    executor.start(server.constants)
    for group in groups:
        found = {}
        for result in executor.run([job for job in server.jobs(1) if job.client in group], None):
            found[str(result.client)] = {
                name: weight.clone() for name, weight in result.update["weights"].items()
            }
    return found


@pytest.mark.usefixtures("precise")
def test_a_client_without_a_loss_takes_no_step(tmp_path):
    """A client of one class has no negatives; weight decay alone must not move its weights."""
    settings = ("method.name=triplet", "train.weight_decay=0.5", "train.lr=0.001")
    federation = Federation(tiny(*settings))
    one_class, *others = federation.partition.clients
    labels = federation.images.labels
    one_class = one_class[labels[one_class] == labels[one_class[0]]]
    partition = replace(federation.partition, clients=[one_class, *others])
    together = updates_of(
        Stacked, tmp_path / "together", (*settings, "engine.stack=4"), [range(4)], partition
    )
    alone = updates_of(InProcess, tmp_path / "alone", settings, [range(4)], partition)
    close(together, alone)
    assert same(together["0"], alone["0"])
    initial = federation.initial_weights()
    assert all(
        torch.equal(together["0"][name], initial[name]) for name, _ in federation.networks.named_parameters()
    )


@pytest.mark.usefixtures("precise")
def test_a_first_group_may_be_smaller_than_later_ones(tmp_path):
    settings = ("method.name=fed_byol", "train.lr=0.0001")
    groups = [range(2), range(4)]
    together = updates_of(Stacked, tmp_path / "together", (*settings, "engine.stack=4"), groups)
    alone = updates_of(InProcess, tmp_path / "alone", settings, groups)
    assert len(together) == 4
    close(together, alone)


def test_a_resumed_run_ends_with_the_same_bytes(tmp_path):
    settings = (*UNEQUAL, "method.name=fed_moco", "options.moco.queue=64", "engine.stack=3", "train.rounds=3")
    whole = remains(run_tiny(tmp_path / "whole", *settings))

    class Stop:
        def round(self, record, line):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        atoll.simulate(tiny(*settings), tmp_path / "parts", callbacks=[Stop()])
    assert same(remains(run_tiny(tmp_path / "parts", *settings, resume=True)), whole)


@pytest.mark.parametrize(
    "settings",
    [("workers=2",), ("decoders=1",), ("devices=['cpu','cpu']",)],
    ids=["workers", "decoders", "devices"],
)
def test_a_stack_is_of_one_process(settings):
    said = (
        rf"engine.stack trains clients together in one process; add engine.{settings[0].partition('=')[0]}="
    )
    with pytest.raises(UserError, match=said):
        tiny("engine.stack=2", *(f"engine.{setting}" for setting in settings))


@pytest.mark.parametrize(
    "setting",
    ["train.accumulate=2", "train.checkpoint_gradients=true", "train.compile=true", "train.cuda_graphs=true"],
)
def test_options_that_change_how_an_encoder_is_computed_are_refused(setting):
    with pytest.raises(UserError, match=r"cannot be used with engine\.stack; leave out one of them"):
        tiny("engine.stack=2", setting)


@pytest.mark.usefixtures("precise")
def test_only_clients_of_earlier_rounds_may_have_a_copy(tmp_path):
    """FeatARC loads the last encoder of clients that have trained before, for another use than a declared pass."""
    settings = ("method.name=featarc", "partition.clients=6", "train.participation=0.5", "train.lr=0.001")
    settings = (*settings, "seed=1")  # a cohort in which only some have
    together = rounds_of(Stacked, tmp_path / "together", (*settings, "engine.stack=3"), count=3)
    alone = rounds_of(InProcess, tmp_path / "alone", settings, count=3)
    close(together[0], alone[0])


class Own:
    """What a component of a user's has."""

    source: ClassVar[str] = "a test"


@dataclass(frozen=True)
class Late(Own, Term):
    """Makes a copy of the networks in the first step, when its images are made."""

    name: ClassVar[str] = "late"

    def forwards(self):
        return Forward("view1"), Forward("view1", "teacher")

    def inputs(self, context, batch):
        if context.steps == 0:
            context.frozen("teacher", context.received)
        return {}

    def loss(self, context, batch, passes):
        return (passes[Forward("view1")].h - passes[Forward("view1", "teacher")].h).square().mean()


@dataclass(frozen=True)
class Freeze(Own, Term):
    """Freezes the first convolution in the second round."""

    name: ClassVar[str] = "freeze"

    def start(self, context):
        context.networks["encoder"].conv1.requires_grad_(context.round < 2)

    def loss(self, context, batch, passes):
        return torch.zeros(())


@dataclass(frozen=True)
class GradientNorm(Own, Term):
    """Scales the projector by the norm of all gradients, after the step."""

    name: ClassVar[str] = "gradient_norm"

    def loss(self, context, batch, passes):
        return torch.zeros(())

    @torch.no_grad()
    def after_step(self, context):
        norms = [weight.grad.norm() for weight in context.networks.parameters() if weight.grad is not None]
        for weight in context.networks["projector"].parameters():
            weight.mul_(1 + 0.01 * torch.stack(norms).norm().tanh())


@pytest.mark.usefixtures("precise")
@pytest.mark.parametrize("term", [Late, Freeze, GradientNorm])
def test_a_users_term_trains_as_alone(term, tmp_path):
    settings = ("method.name=fed_simclr", f"method.terms=['{__name__}:{term.__name__}']", *UNEQUAL)
    settings = (*settings, "train.weight_decay=0.1")
    together = rounds_of(Stacked, tmp_path / "together", (*settings, "engine.stack=4"))
    alone = rounds_of(InProcess, tmp_path / "alone", settings)
    close(together[0], alone[0])


@dataclass(frozen=True)
class SomeHeadsOnly(Own, Objective):
    """An objective that trains the encoder of all clients but the first."""

    name: ClassVar[str] = "some_heads_only"

    def forwards(self):
        return (Forward("view1"),)

    def loss(self, context, batch, passes):
        h = passes[Forward("view1")].h
        return context.networks["projector"](h if context.client else h.detach()).square().mean()


@pytest.mark.usefixtures("precise")
def test_an_encoder_that_no_loss_reaches_takes_no_step(tmp_path):
    settings = (f"method.objective={__name__}:SomeHeadsOnly", "method.name=fed_simclr", "train.lr=0.001")
    settings = (*settings, "train.weight_decay=0.5")
    together = updates_of(Stacked, tmp_path / "together", (*settings, "engine.stack=4"), [range(4)])
    alone = updates_of(InProcess, tmp_path / "alone", settings, [range(4)])
    close(together, alone)
    initial = Federation(tiny(*settings)).initial_weights()
    encoder = [name for name in initial if name.startswith("encoder.") and name.endswith("weight")]
    assert all(torch.equal(together["0"][name], initial[name]) for name in encoder)
    assert not any(torch.equal(together["1"][name], initial[name]) for name in encoder)


class Centred(nn.Module):
    """An encoder with a running mean in a buffer that it assigns anew."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 16)
        self.register_buffer("centre", torch.zeros(16))

    def forward(self, images):
        h = self.linear(images.flatten(1))
        if self.training:
            self.centre = 0.9 * self.centre + 0.1 * h.detach().mean(0)
        return torch.relu(h - self.centre)


RAW = ("views.mean=[0]", "views.std=[1]", "method.name=fed_simclr", "train.lr=0.001")


@pytest.mark.usefixtures("precise")
@pytest.mark.filterwarnings("ignore:model.* does not apply")  # options of the narrow ResNet
@pytest.mark.parametrize("settings", [(), UNEQUAL], ids=["equal", "unequal"])
def test_a_buffer_that_is_assigned_anew_is_kept(settings, tmp_path):
    settings, encoder = (*settings, *RAW), Centred()
    together = rounds_of(Stacked, tmp_path / "together", (*settings, "engine.stack=4"), encoder=encoder)
    alone = rounds_of(InProcess, tmp_path / "alone", settings, encoder=encoder)
    close(together[0], alone[0])
    (centre,) = [w for name, w in alone[0]["state"]["models"]["global"].items() if name.endswith("centre")]
    assert centre.any()


@pytest.mark.filterwarnings("ignore:model.* does not apply")  # options of the narrow ResNet
@pytest.mark.parametrize("cohort", ["1.0", "0.25"], ids=["several clients", "a single one"])
def test_an_encoder_with_dropout_is_refused(cohort, tmp_path):
    dropping = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Dropout(0.5))
    recipe = give(tiny("engine.stack=2", f"train.participation={cohort}", *RAW), encoder=dropping)
    with pytest.raises(UserError, match=r"this encoder: it draws random numbers .*; leave out engine.stack"):
        atoll.simulate(recipe, tmp_path / "run")
