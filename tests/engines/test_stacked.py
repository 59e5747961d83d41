"""Clients that train together against clients that train one by one."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import atoll
from atoll.core.errors import UserError
from atoll.core.tree import leaves, same
from atoll.engines.client_states import ClientStates
from atoll.engines.executors import InProcess
from atoll.engines.federation import Federation
from atoll.engines.server import Server
from atoll.engines.stacked import Stacked
from atoll.recipe.recipe import give
from tests.harness import remains, run_tiny, tiny

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


def rounds_of(executor_class, folder, settings, dropout=False, count=2):
    """The server's state, its records, what clients keep, and the images of each step, after some rounds."""
    federation = Federation(tiny(*settings))
    if dropout:
        federation.networks["projector"].append(nn.Dropout(0.5))
    server = Server(federation.recipe, federation.setting, federation.initial_weights())
    states = ClientStates(folder)
    executor = executor_class(federation, states)
    executor.start(server.constants)
    images = []
    records = [server.run_round(executor, images.append) for _ in range(count)]
    kept = [states.load(client, count) for client in range(4)] if federation.recipe.composed.keeps else []
    return server.checkpoint(), records, kept, images


def close(tree, other):
    pairs = list(zip(leaves(tree), leaves(other), strict=True))
    assert pairs
    for tensor, expected in pairs:
        torch.testing.assert_close(tensor, expected, rtol=1e-3, atol=5e-5)


@pytest.mark.parametrize("stack", [4, 3])
@pytest.mark.parametrize("settings", METHODS.values(), ids=METHODS)
def test_together_is_one_by_one_up_to_rounding(settings, stack, tmp_path):
    settings = (*UNEQUAL, *settings)
    state, records, kept, images = rounds_of(
        Stacked, tmp_path / "together", (*settings, f"engine.stack={stack}")
    )
    expected, plain_records, plain_kept, plain_images = rounds_of(InProcess, tmp_path / "alone", settings)
    close(state, expected)
    if plain_kept:
        close(kept, plain_kept)
    for record, plain in zip(records, plain_records, strict=True):
        assert record.losses == pytest.approx(plain.losses, rel=1e-4)
        assert record.clients == plain.clients == 4
    assert sorted(images) == sorted(plain_images)


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
    with pytest.raises(UserError, match=r"engine.stack trains clients together in one process, so it needs"):
        tiny("engine.stack=2", *(f"engine.{setting}" for setting in settings))


@pytest.mark.parametrize("setting", ["train.accumulate=2", "train.checkpoint_gradients=true"])
def test_options_that_save_memory_are_refused(setting, tmp_path):
    with pytest.raises(UserError, match=r"saves memory and engine.stack needs more"):
        run_tiny(tmp_path / "run", "engine.stack=2", setting)


@pytest.mark.filterwarnings("ignore:model.* does not apply")  # options of the narrow ResNet
def test_an_encoder_with_dropout_is_refused(tmp_path):
    dropping = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Dropout(0.5))
    recipe = give(
        tiny("engine.stack=2", "views.mean=[0]", "views.std=[1]", "method.name=fed_simclr"), encoder=dropping
    )
    with pytest.raises(UserError, match=r"engine.stack cannot be used with this encoder: .*random"):
        atoll.simulate(recipe, tmp_path / "run")
