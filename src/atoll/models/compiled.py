"""Compiled encoders: PyTorch generates code that computes several operations at once (``torch.compile``)."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

from atoll.core.errors import UserError
from atoll.core.text import first_line

MOST = 64  # of versions: shapes of images, with and without gradients, training and not


class CompiledEncoders:
    """Calls encoders, on full batches by compiled code.

    Code is generated for each shape of images by itself, so that what it computes does not depend on the batches
    that a process has met before. All other batches are computed as by the encoder alone.

    Compiled code of earlier encoders, also of your own functions, is forgotten: there is a limit to the versions
    of a function, beyond which PyTorch would go on without compiling, and so with other last bits.

    Args:
        sizes: Numbers of images of a full batch or of its parts; multiples of them are full, too (both views).
        device: Where the encoders are.
        cuda_graphs: Record the code's kernels as CUDA graphs and replay these; without effect on a CPU.
    """

    def __init__(self, sizes: Collection[int], device: torch.device, cuda_graphs: bool = False) -> None:
        torch.compiler.reset()
        self._sizes = sizes
        self._cuda_graphs = cuda_graphs
        options = {
            "fallback_random": True,  # dropout draws what it draws without compiled code
            # On a CPU, this would compute all convolutions in the channels-last layout, with which oneDNN
            # damages memory (see `atoll.models.layout`).
            "layout_optimization": device.type != "cpu",
            "deterministic": True,  # no choice of code by its time on this device
            "triton.cudagraphs": cuda_graphs,
        }
        known = torch._inductor.list_options()
        self._code = torch.compile(
            _call, dynamic=False, options={name: value for name, value in options.items() if name in known}
        )

    def begin_step(self) -> None:
        """Let the memory of the graphs of the last step, with the gradients, be used again.

        PyTorch would take each pass without gradients for a step of its own, and each part of a batch.
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
