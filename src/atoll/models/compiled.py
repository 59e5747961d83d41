"""Compiled encoders: PyTorch generates code that computes several operations at once (``torch.compile``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from atoll.core.errors import UserError

MOST = 64  # of versions: shapes of images, with and without gradients, training and not


@contextmanager
def compiled(encoders: Iterable[nn.Module], size: int) -> Iterator[None]:
    """Within the context, encoders run compiled code on batches of a size or a multiple of it.

    Code is generated for each shape by itself, so that what it computes does not depend on the batches that a
    process has met before; a client's last, smaller batch is computed as without this context.

    Args:
        encoders: The encoders; the first batch of each shape takes up to a minute.
        size: Number of images.

    Raises:
        UserError: In an encoder's call, if PyTorch cannot compile it.
    """
    chosen = list(encoders)
    if not chosen:
        yield
        return
    from torch._dynamo import config

    for encoder in chosen:
        run = partial(_run, encoder.forward, torch.compile(encoder.forward, dynamic=False), size)
        setattr(encoder, "forward", run)  # noqa: B010  (mypy: a method)
    with ExitStack() as stack:
        for encoder in chosen:
            stack.callback(delattr, encoder, "forward")
        # Beyond the limit, PyTorch would go on without compiled code, and with it the last bits would change.
        stack.enter_context(config.patch(recompile_limit=MOST, fail_on_recompile_limit_hit=True))
        yield


def forget_compiled() -> None:
    """Forget the code of earlier encoders, which counts towards the limit of versions."""
    torch.compiler.reset()


def _run(forward: Callable[..., Tensor], code: Callable[..., Tensor], size: int, images: Tensor) -> Any:
    if len(images) % size:
        return forward(images)
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    try:
        return code(images)
    except (FailOnRecompileLimitHit, TorchDynamoException) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"train.compile: PyTorch cannot compile this encoder ({reason}); leave it out"
        ) from error
