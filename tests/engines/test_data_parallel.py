"""One client trained by several processes over gloo: the weights are those of one process, up to rounding."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from atoll.core.errors import RunError, UserError
from atoll.core.tree import leaves, map_tensors, pack, unpack
from atoll.engines.client import train_client
from atoll.engines.data_parallel import Ranks, _SharedNorm2d, train_together
from atoll.engines.federation import Federation
from atoll.engines.server import Server
from atoll.functional import nt_xent
from tests.harness import tiny
from tests.versions import since


def on_ranks(count: int, work: Callable[..., Any], place: Path, *arguments: Any) -> list[Any]:
    """Do a work in processes of one group; return what each one made, or the sentence of its error."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue()

    def rank(number: int) -> None:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{place / 'group'}",
            rank=number,
            world_size=count,
            timeout=timedelta(seconds=60),
        )
        try:
            made = work(*arguments)
        except (RunError, UserError) as error:
            made = str(error)
        queue.put((number, pack({"made": made})))
        dist.barrier()

    processes = [context.Process(target=rank, args=(number,)) for number in range(count)]
    for process in processes:
        process.start()
    found = dict(queue.get(timeout=100) for _ in processes)
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    return [unpack(found[number])["made"] for number in range(count)]


def close(one, other, tolerance):
    pairs = list(zip(leaves(one), leaves(other), strict=True))
    return bool(pairs) and all(
        torch.allclose(torch.as_tensor(a), torch.as_tensor(b), rtol=tolerance, atol=tolerance)
        for a, b in pairs
    )


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(1, 3, 3),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(48, 6),
        nn.BatchNorm1d(6),
    )
    return nn.Sequential(*layers).double()


def gradients(ranks_of: Callable[[nn.Module], Ranks] | None) -> dict[str, Any]:
    """Gradients of a contrastive loss of five images and of a term of the weights; and BatchNorm's statistics."""
    encoder, head = network(), nn.Linear(6, 4).double()
    with torch.no_grad():
        head.weight.copy_(torch.linspace(-1, 1, 24).view(4, 6))
        head.bias.zero_()
    both = nn.ModuleDict({"encoder": encoder, "projector": head})
    ranks = ranks_of(encoder) if ranks_of else None
    images = torch.randn(2, 5, 1, 6, 6, generator=torch.Generator().manual_seed(1)).double()
    z1, z2 = (head(encoder(view)) for view in images)
    (nt_xent(z1, z2) + encoder[0].weight.square().sum()).backward()
    if ranks:
        ranks.average_gradients(both)
    found = {name: weight.grad for name, weight in both.named_parameters()}
    return {"gradients": found, "buffers": {name: value.double() for name, value in both.named_buffers()}}


@pytest.mark.parametrize(("tracked", "mean"), [(True, 0.1), (False, 0.0)])
def test_only_tracked_statistics_change(tracked, mean):
    layer = _SharedNorm2d(3)
    layer.track_running_stats = tracked  # FedCA sets it for public images
    layer._track(torch.ones(3), torch.ones(3))
    torch.testing.assert_close(layer.running_mean, torch.full((3,), mean))


@pytest.mark.parametrize("count", [2, 3])
def test_gathered_gradients_are_those_of_one_process(tmp_path, count):
    alone = gradients(None)
    for found in on_ranks(count, gradients, tmp_path, Ranks):
        assert close(found, alone, 1e-12)


def test_an_encoder_in_evaluation_computes_all_rows(tmp_path):
    def work() -> dict[str, torch.Tensor]:
        encoder = network()
        Ranks(encoder)
        return {"output": encoder.eval()(torch.ones(5, 1, 6, 6).double()).detach()}

    expected = network().eval()(torch.ones(5, 1, 6, 6).double())
    assert close(on_ranks(2, work, tmp_path), [{"output": expected}] * 2, 1e-12)


def test_ranks_that_differ_are_found(tmp_path):
    def work() -> dict[str, torch.Tensor]:
        encoder = network()
        ranks = Ranks(encoder)
        ranks.check_equal(encoder)
        with torch.no_grad():
            encoder[0].weight[0, 0, 0, 0] += 1e-9 * dist.get_rank()
        ranks.check_equal(encoder)
        return {}

    assert all("ended with different weights" in said for said in on_ranks(2, work, tmp_path))


@pytest.mark.parametrize("diverged", [(0, 1), (1,)])
def test_ranks_that_diverged_together_are_equal(tmp_path, diverged):
    def work() -> dict[str, torch.Tensor]:
        encoder = network()
        ranks = Ranks(encoder)
        if dist.get_rank() in diverged:
            torch.nn.init.constant_(encoder[0].weight, float("nan"))
        ranks.check_equal(encoder)
        return {}

    found = on_ranks(2, work, tmp_path)
    if diverged == (0, 1):  # the update says so itself; a site with local privacy hides it
        assert found == [{}, {}]
    else:
        assert all("ended with different weights" in said for said in found)


def trained(settings: tuple[str, ...], together: bool) -> dict[str, Any]:
    """The second update of a client, which has seen one round before."""
    federation = Federation(tiny("train.epochs=2", *settings))
    server = Server(federation.recipe, federation.setting, federation.initial_weights())
    client = federation.client_side(server.constants)
    ranks = Ranks(federation.encoder) if together else None
    retained = None
    for job in (server.jobs(1)[0], server.jobs(2)[0]):
        data = federation.client_data(0)
        if ranks:
            update, retained = train_together(ranks, client, job.message, retained, data)
        else:
            update, retained = train_client(client, job.message, retained, data)
        update, retained = map_tensors(torch.clone, update), map_tensors(torch.clone, retained)
    return {"weights": {name: value.double() for name, value in update["weights"].items()}}


# BYOL and Barlow Twins have rates at which a difference of rounding does not grow: at 0.05 it grows a thousandfold.
METHODS = {
    "fed_simclr": ("train.batch_size=15",),
    "fed_byol": ("train.lr=0.01",),
    "fedprox": ("options.fedprox.weight=1.0",),
    "fed_moco": ("options.moco.queue=64",),
    "fed_barlow": ("train.views_batch=joint", "train.lr=0.002"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_two_processes_train_a_client_as_one_does(tmp_path, name):
    settings = (f"method.name={name}", *METHODS[name])
    alone = trained(settings, together=False)
    first, second = on_ranks(2, trained, tmp_path, settings, True)
    assert close(first, second, 0)
    assert close(first, alone, 2e-4)
    before = Federation(tiny(*settings)).initial_weights()
    moved = max(float((value - before[n].double()).abs().max()) for n, value in alone["weights"].items())
    assert moved > 0.01


@since(torch, 2, 9, reason="computes indices of fake tensors on a GPU")
def test_shared_statistics_do_not_make_the_host_wait_for_a_gpu(monkeypatch):
    """An upload would, in each BatchNorm layer of each pass. The tensors are PyTorch's fake ones of a GPU."""
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: None)
    uploads = []

    class Uploads(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            if func is torch.ops.aten._to_copy.default and made.is_cuda and not args[0].is_cuda:
                uploads.append(made.shape)
            return made

    with FakeTensorMode(), torch.device("cuda"):
        layer, x = _SharedNorm2d(3), torch.empty(4, 3, 2, 2)
        layer.ranks = SimpleNamespace(splits=True, group=None)
        with Uploads():
            assert layer(x).is_cuda
            assert uploads == []
            x.new_tensor([1.0])
            assert uploads  # which is what it would see
