"""Data-parallel training of one client: several processes (ranks) of a PyTorch process group share each batch.

Every rank draws the same batch and holds the same networks. The encoder computes only the rank's own rows of the
batch; its outputs are gathered, and every rank computes heads and losses on the whole batch. A contrastive loss
therefore sees all negatives of the batch, and only the encoder's BatchNorm layers need statistics from all ranks.
Gradients are averaged before the optimiser's step, as in DistributedDataParallel. The weights equal those of one
process up to rounding, not bit for bit.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from atoll.components.messages import ClientState, Message, Update
from atoll.core.errors import RunError, UserError
from atoll.core.text import type_words
from atoll.core.tree import Tree
from atoll.data.batch import ClientData
from atoll.engines.client import Client, train_client
from atoll.models.norms import norm_layers


class Ranks:
    """The processes that train a client together; in training, an encoder computes the rows of its rank.

    Args:
        encoder: The encoder. It is changed permanently, and so are its copies.
        group: The process group; None for the default one.

    Raises:
        UserError: The encoder has a layer that cannot be split.
    """

    def __init__(self, encoder: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank, self.count = dist.get_rank(group), dist.get_world_size(group)
        self.splits = False  # whether an encoder is computing a rank's rows now
        self._rows: list[int] = []
        for name, layer in norm_layers(encoder).items():
            if type(layer) not in _SHARED:
                raise UserError(
                    f"the encoder's layer {name} is {type_words(layer)}; only BatchNorm1d and "
                    "BatchNorm2d can be shared by several processes"
                )
            layer.__class__ = _SHARED[type(layer)]
            vars(layer)["ranks"] = self
        encoder.register_forward_pre_hook(self._split)
        encoder.register_forward_hook(self._gather)

    def __deepcopy__(self, memo: object) -> Ranks:
        return self  # a copy of an encoder belongs to the same ranks

    def average_gradients(self, networks: nn.Module) -> None:
        """Replace the gradients of all weights by their means over the ranks."""
        gradients = [weight.grad for weight in networks.parameters() if weight.grad is not None]
        if not gradients:
            return
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=self.group)
        flat /= self.count
        for gradient, mean in zip(
            gradients, torch.split(flat, [each.numel() for each in gradients]), strict=True
        ):
            gradient.copy_(mean.view_as(gradient))

    def check_equal(self, networks: nn.Module) -> None:
        """Compare the networks of all ranks.

        Weights that are finite on no rank count as equal: the receiver of the update decides how to treat it, and a
        site with local privacy must not reveal that training diverged.

        Raises:
            RunError: They differ, because something such as dropout draws different random numbers on each rank.
        """
        sums = torch.stack([value.double().sum() for value in networks.state_dict().values()])
        sums = torch.where(sums.isfinite(), sums, math.inf)
        largest, least = sums.clone(), sums.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self.group)
        if not torch.equal(largest, least):
            raise RunError(
                "the processes that train a client ended with different weights; do its networks draw random "
                "numbers, as dropout does?"
            )

    def _split(self, encoder: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if not encoder.training:
            return None
        (images,) = inputs
        parts = images.tensor_split(self.count)
        self._rows, self.splits = [len(part) for part in parts], True
        return (parts[self.rank],)

    def _gather(self, encoder: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        if not self.splits:
            return None
        self.splits = False
        gathered: Tensor = _Gather.apply(output, self, self._rows)
        return gathered


def train_together(
    ranks: Ranks,
    client: Client,
    message: Message,
    retained: ClientState | None,
    data: ClientData,
) -> tuple[Update, ClientState | None]:
    """Run one client's complete round on all ranks; every rank calls it with the same arguments.

    Args:
        ranks: The ranks, built from the client's encoder.
        client: The reusable client side.
        message: Result of `Method.send`.
        retained: The client state, or None.
        data: The client's samples, all of them on every rank.

    Returns:
        What `train_client` returns, on every rank.

    Raises:
        UserError: The recipe checkpoints gradients or compiles encoders.
        RunError: The ranks ended with different weights.
    """
    train = client.setting.train
    for name, used in {"checkpoint_gradients": train.checkpoint_gradients, "compile": train.compile}.items():
        if used:
            raise UserError(f"train.{name} cannot be used where several processes train a client")
    result = train_client(client, message, retained, data, before_step=ranks.average_gradients)
    ranks.check_equal(client.networks)
    return result


class _Gather(torch.autograd.Function):
    """Rows of all ranks, in order.

    Every rank computes the same loss from all rows, so the gradients of its own rows are complete. They are
    multiplied by the number of ranks, because the gradients of the weights are averaged afterwards.
    """

    @staticmethod
    def forward(ctx: Tree, own: Tensor, ranks: Ranks, rows: list[int]) -> Tensor:
        ctx.ranks, ctx.rows = ranks, rows
        padded = own.new_zeros(max(rows), *own.shape[1:])
        padded[: len(own)] = own
        found = [torch.empty_like(padded) for _ in rows]
        dist.all_gather(found, padded, group=ranks.group)
        return torch.cat([part[:count] for part, count in zip(found, rows, strict=True)])

    @staticmethod
    def backward(ctx: Tree, gradient: Tensor) -> tuple[Tensor, None, None]:
        ranks: Ranks = ctx.ranks
        return torch.split(gradient, ctx.rows)[ranks.rank] * ranks.count, None, None


class _Sum(torch.autograd.Function):
    """Sum over all ranks, whose gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Tree, own: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        total = own.clone()
        dist.all_reduce(total, group=ranks.group)
        return total

    @staticmethod
    def backward(ctx: Tree, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.ranks.group)
        return total, None


class _SharedNorm(_BatchNorm):
    """BatchNorm with the statistics of all ranks' rows; torch's SyncBatchNorm works only on GPUs."""

    ranks: Ranks

    def forward(self, input: Tensor) -> Tensor:
        if not self.ranks.splits or not self.training:
            return super().forward(input)
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        dims = [0, *range(2, x.dim())]
        shape = [1, -1, *[1] * (x.dim() - 2)]
        count = x.new_full((1,), x.numel() / x.shape[1])  # without an upload, which would block the host
        sums: Tensor = _Sum.apply(torch.cat([x.sum(dims), count]), self.ranks)
        mean, total = sums[:-1] / sums[-1], sums[-1].detach()
        centred = x - mean.view(shape)
        squares: Tensor = _Sum.apply(centred.square().sum(dims), self.ranks)
        variance = squares / total
        self._track(mean.detach(), squares.detach() / (total - 1))
        y: Tensor = centred * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            y = y * self.weight.view(shape) + self.bias.view(shape)
        return y.to(input.dtype)

    def _track(self, mean: Tensor, variance: Tensor) -> None:
        if not self.track_running_stats:  # such as for FedCA's public images with batch_norm = "batch"
            return
        if self.num_batches_tracked is None or self.running_mean is None or self.running_var is None:
            return
        self.num_batches_tracked.add_(1)
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)


class _SharedNorm1d(_SharedNorm, nn.BatchNorm1d):
    pass


class _SharedNorm2d(_SharedNorm, nn.BatchNorm2d):
    pass


_SHARED: dict[type[nn.Module], type[_SharedNorm]] = {
    nn.BatchNorm1d: _SharedNorm1d,
    nn.BatchNorm2d: _SharedNorm2d,
}
