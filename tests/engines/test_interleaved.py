"""Clients that train a step each in turn, against clients that train one after another."""

import random
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import atoll
from atoll.components.base import Term
from atoll.core.errors import UserError
from atoll.engines.client_states import ClientStates
from atoll.engines.executors import InProcess
from atoll.engines.federation import Federation
from atoll.engines.interleaved import Interleaved
from atoll.engines.server import Server
from atoll.methods.registry import METHODS as CATALOGUE
from tests.engines.test_stacked import METHODS, RAW, UNEQUAL, rounds_of
from tests.harness import final_models, remains, run_tiny, tiny
from tests.test_every_method import NEEDS
from tests.trees import same

OTHERS = {
    "parts of batches": ("method.name=fed_simclr", "train.accumulate=2"),
    "recomputed activations": ("method.name=fed_simclr", "train.checkpoint_gradients=true"),
    "reset": ("method.name=featarc", "partition.clients=6", "train.participation=0.5"),
}


def check_equal(settings, folder, *counts, **more):
    """The bytes of the models, of what clients keep, and the numbers of the records."""
    expected, plain_records, plain_kept, plain_images = rounds_of(
        InProcess, folder / "alone", settings, **more
    )
    for count in counts:
        state, records, kept, images = rounds_of(
            Interleaved, folder / f"together-{count}", (*settings, f"engine.streams={count}"), **more
        )
        assert same(state, expected)
        assert same(kept, plain_kept)
        for record, plain in zip(records, plain_records, strict=True):
            assert record.losses == plain.losses
        assert sorted(images) == sorted(plain_images)


@pytest.mark.parametrize("settings", [*METHODS.values(), *OTHERS.values()], ids=[*METHODS, *OTHERS])
def test_the_bytes_are_those_of_clients_that_train_alone(settings, tmp_path):
    check_equal((*UNEQUAL, *settings), tmp_path, 4, 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CATALOGUE))
def test_each_method_has_its_bytes(name, tmp_path):
    check_equal((f"method.name={name}", *NEEDS.get(name, ())), tmp_path, 3)


@dataclass(frozen=True)
class Draws(Term):
    """A term of a user's that draws from every stream of the process, in its images and in its loss."""

    name: ClassVar[str] = "draws"
    source: ClassVar[str] = "a test"

    def inputs(self, context, batch):
        return {"view1": batch.images["view1"] + 0.1 * float(np.random.rand())}

    def loss(self, context, batch, passes):
        weight = context.networks["projector"].state_dict(keep_vars=True)
        scale = random.random() + torch.rand(()) + float(np.random.rand())
        return scale * next(iter(weight.values())).square().mean()


def test_random_layers_and_a_users_code_draw_what_they_draw_alone(tmp_path):
    settings = (*UNEQUAL, "method.name=fed_simclr", f"method.terms=['{__name__}:Draws']")
    check_equal(settings, tmp_path, 4, dropout=True)


class Noisy(nn.Module):
    """An encoder, given as an object, that draws from two streams."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 16)

    def forward(self, images):
        noise = float(np.random.rand()) + torch.rand(()) if self.training else 0
        return self.linear(images.flatten(1)) + noise


@pytest.mark.filterwarnings("ignore:model.* does not apply")  # options of the narrow ResNet
def test_an_encoder_that_is_given_draws_what_it_draws_alone(tmp_path):
    check_equal((*UNEQUAL, *RAW), tmp_path, 3, encoder=Noisy())


def test_copies_of_the_networks_are_not_recomputed(tmp_path):
    settings = ("method.name=fed_byol", "train.checkpoint_gradients=true", "engine.streams=2")
    federation = Federation(tiny(*settings))
    server = Server(federation.recipe, federation.setting, federation.initial_weights(), {})
    executor = Interleaved(federation, ClientStates(tmp_path))
    executor.start(server.constants)
    server.run_round(executor, None)
    for client in executor._clients:
        assert not any("forward" in vars(module) for module in client.copies["byol_target"].modules())


def test_a_run_may_be_resumed_with_another_number(tmp_path):
    settings = (*UNEQUAL, "method.name=fed_moco", "options.moco.queue=64", "train.rounds=3")
    whole = final_models(run_tiny(tmp_path / "whole", *settings))

    class Stop:
        def round(self, record, line):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        atoll.simulate(tiny(*settings, "engine.streams=3"), tmp_path / "parts", callbacks=[Stop()])
    parts = run_tiny(tmp_path / "parts", *settings, "engine.streams=2", resume=True)
    assert same(final_models(parts), whole)
    assert remains(parts)


def test_a_draw_of_the_process_is_left_as_it_was(tmp_path):
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    rounds_of(Interleaved, tmp_path, ("method.name=fed_simclr", "engine.streams=2"), count=1)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize("setting", ["workers=2", "decoders=1", "devices=['cpu','cpu']"])
def test_streams_are_of_one_process(setting):
    said = rf"engine.streams trains clients together in one process; add engine.{setting.partition('=')[0]}="
    with pytest.raises(UserError, match=said) as refused:
        tiny("engine.streams=2", f"engine.{setting}")
    tiny("engine.streams=2", f"engine.{setting}", *str(refused.value).partition("; add ")[2].split())


@pytest.mark.parametrize("setting", ["engine.stack=2", "train.compile=true", "train.cuda_graphs=true"])
def test_what_cannot_be_combined_is_refused(setting):
    with pytest.raises(UserError, match=r"cannot be used with"):
        tiny("engine.streams=2", setting)
