"""Several encoders of one kind as a single one: their weights share a tensor with an axis for the encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from atoll.core.errors import UserError


class EncoderStack:
    """Encoders with equal structure, whose weights and buffers become rows of stacked tensors.

    Whatever changes a row (an optimiser, a load) changes the encoder, and the other way round.

    Args:
        encoders: The encoders, which keep their parameters as objects.
    """

    def __init__(self, encoders: Sequence[nn.Module]) -> None:
        self._encoders = encoders
        self._weights = [dict(encoder.named_parameters()) for encoder in encoders]
        self._buffers = [dict(encoder.named_buffers()) for encoder in encoders]
        self._stacked_weights = {
            name: _share(self._weights, name).requires_grad_(weight.requires_grad)
            for name, weight in self._weights[0].items()
        }
        self._stacked_buffers = {name: _share(self._buffers, name) for name in self._buffers[0]}

    def __len__(self) -> int:
        return len(self._encoders)

    def __call__(self, rows: Sequence[int], images: Tensor) -> Tensor:
        """Encode one batch for each of the chosen encoders, in the mode of the first encoder, without autocast.

        Args:
            rows: The encoders.
            images: A batch for each of them.

        Shape:
            images: (K, N, C, H, W); result: (K, N, d).

        Raises:
            UserError: The encoder draws random numbers, or has an operation that cannot be stacked.
        """
        chosen = _slice(rows)
        weights = {name: stacked[chosen] for name, stacked in self._stacked_weights.items()}
        buffers = {name: stacked[chosen] for name, stacked in self._stacked_buffers.items()}
        encoder = self._encoders[0]

        def encode(weights: dict[str, Tensor], buffers: dict[str, Tensor], images: Tensor) -> Tensor:
            h: Tensor = functional_call(encoder, (weights, buffers), (images,))
            return h

        try:
            # Autocast misses what `vmap` makes of a convolution, and BatchNorm refuses mixed precision there.
            with torch.autocast(images.device.type, enabled=False):
                h = vmap(encode, randomness="error")(weights, buffers, images)
        except RuntimeError as error:
            if "vmap" not in str(error) and "batching rule" not in str(error).lower():
                raise
            raise UserError(
                f"engine.stack cannot be used with this encoder: {str(error).splitlines()[0]}"
            ) from None
        if not isinstance(chosen, slice):  # then the buffers are copies
            for name, buffer in buffers.items():
                # `.data`: an earlier call's backward pass holds the buffers, and would refuse them if changed.
                self._stacked_buffers[name].data[chosen] = buffer
        return h

    def pass_on_gradients(self, rows: Sequence[int]) -> None:
        """Add the gradients of the stacked weights to those of the chosen encoders' parameters."""
        for name, stacked in self._stacked_weights.items():
            if stacked.grad is None:
                continue
            gradients = stacked.grad.unbind()
            for row in rows:
                weight, own = self._weights[row][name], gradients[row]
                weight.grad = own if weight.grad is None else weight.grad + own
            stacked.grad = None


def _share(tensors: Sequence[Mapping[str, Tensor]], name: str) -> Tensor:
    """Stack the tensors of one name, which become the rows of the result."""
    stacked = torch.stack([each[name].detach() for each in tensors])
    for each, row in zip(tensors, stacked.unbind(), strict=True):
        each[name].data = row
    return stacked


def _slice(rows: Sequence[int]) -> slice[int | None, int | None, None] | list[int]:
    """The first rows as a slice, which needs no copy."""
    return slice(len(rows)) if list(rows) == list(range(len(rows))) else list(rows)
