"""Compiled encoders: PyTorch generates code that computes several operations at once (``torch.compile``)."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

from atoll.core.errors import UserError
from atoll.core.text import first_line

MOST = 64  # versions of the code: shapes of images, with and without gradients, in train and eval mode


class CompiledEncoders:
    """Calls encoders; full batches are computed by compiled code.

    Code is generated separately for each shape of images, so that results do not depend on the batches that a
    process has computed before. The encoder itself computes all other batches.

    The constructor discards all compiled code, also that of the user's functions: PyTorch limits the versions of a
    function, and beyond the limit it would continue without compiled code, and so with other last bits.

    Args:
        sizes: Numbers of images in a full batch or in its parts; multiples of them are full, too (both views).
        device: Device of the encoders.
        cuda_graphs: Record the code's kernels as CUDA graphs and replay these; no effect on a CPU.
    """

    def __init__(self, sizes: Collection[int], device: torch.device, cuda_graphs: bool = False) -> None:
        torch.compiler.reset()
        self._sizes = sizes
        self._cuda_graphs = cuda_graphs
        options = {
            "fallback_random": True,  # dropout draws the same numbers as without compiled code
            # On a CPU, this would compute all convolutions in the channels-last layout, with which oneDNN
            # damages memory (see `atoll.models.layout`).
            "layout_optimization": device.type != "cpu",
            "deterministic": True,  # code is not chosen by its speed on this device
            "triton.cudagraphs": cuda_graphs,
        }
        known = torch._inductor.list_options()
        self._code = torch.compile(
            _call, dynamic=False, options={name: value for name, value in options.items() if name in known}
        )

    def begin_step(self) -> None:
        """Allow the graphs' memory of the last step, including its gradients, to be reused.

        Otherwise, PyTorch would treat each pass without gradients, and each part of a batch, as a separate step.
        """
        if self._cuda_graphs:
            begin: Callable[[], None] = torch.compiler.cudagraph_mark_step_begin  # has no types
            begin()

    def __call__(self, encoder: nn.Module, images: Tensor) -> Tensor:
        """Compute an encoder's output; the first batch of each shape takes up to a minute.

        Raises:
            UserError: PyTorch cannot compile the encoder.
        """
        if all(len(images) % size for size in self._sizes):
            return _call(encoder, images)
        from torch._dynamo import config
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

        try:
            with config.patch(recompile_limit=MOST, fail_on_recompile_limit_hit=True):
                h: Tensor = self._code(encoder, images)
                return h.clone() if self._cuda_graphs else h  # a component may keep it beyond the step
        except FailOnRecompileLimitHit as error:
            reason = f"it needs more than {MOST} versions of its code, such as another one at each call"
            raise _refusal(reason) from error
        except TorchDynamoException as error:
            raise _refusal(first_line(error)) from error


def _call(encoder: nn.Module, images: Tensor) -> Tensor:
    h: Tensor = encoder(images)
    return h


def _refusal(reason: str) -> UserError:
    return UserError(
        f"train.compile: PyTorch cannot compile this encoder ({reason}); leave out train.compile"
    )
