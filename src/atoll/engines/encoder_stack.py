"""Several encoders of one kind as a single one: their weights are stacked along an axis for the encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.func import functional_call, vmap
from torch.utils.hooks import RemovableHandle

from atoll.core.devices import upload
from atoll.core.errors import UserError
from atoll.core.text import first_line


class EncoderStack:
    """Encoders with equal structure, whose weights and buffers become rows of stacked tensors.

    A change of a row (by an optimiser, by loading weights) changes the encoder, and vice versa. Only gradients must
    be passed on, because optimisers use the encoders' own parameters.

    Args:
        encoders: The encoders; their parameters remain the same objects.
    """

    def __init__(self, encoders: list[nn.Module]) -> None:
        self.encoders = encoders
        self._weights = [dict(encoder.named_parameters()) for encoder in encoders]
        self._buffers = [dict(encoder.named_buffers()) for encoder in encoders]
        self._stacked_weights = {name: _share(self._weights, name) for name in self._weights[0]}
        self._stacked_buffers = {name: _share(self._buffers, name) for name in self._buffers[0]}
        self._reached: set[int] = set()  # the rows that a loss depends on
        self._hooks: list[RemovableHandle] = []

    def __call__(self, rows: Sequence[int], images: Sequence[Tensor]) -> list[Tensor]:
        """Encode one batch for each of the chosen encoders, in the mode of the first encoder, without autocast.

        Args:
            rows: The encoders.
            images: A batch for each of them, all of one shape.

        Returns:
            The outputs of each batch.

        Raises:
            UserError: The encoder draws random numbers, or has an operation that cannot be stacked.
        """
        device = images[0].device
        first = list(rows) == list(range(len(rows)))
        # The first rows are a slice, which needs no copy.
        chosen = slice(len(rows)) if first else upload(torch.tensor(rows), device)
        for name, stacked in self._stacked_weights.items():  # a component may have frozen weights
            stacked.requires_grad_(any(own[name].requires_grad for own in self._weights))
        weights = {name: stacked[chosen] for name, stacked in self._stacked_weights.items()}
        buffers = {name: stacked[chosen] for name, stacked in self._stacked_buffers.items()}
        encoder = self.encoders[0]

        def encode(
            weights: dict[str, Tensor], buffers: dict[str, Tensor], batch: Tensor
        ) -> tuple[Tensor, dict[str, Tensor]]:
            state = {**weights, **buffers}
            h: Tensor = functional_call(encoder, state, (batch,))
            return h, {name: state[name].detach() for name in buffers if state[name] is not buffers[name]}

        try:
            # Autocast does not reach convolutions under `vmap`, and BatchNorm refuses mixed precision there.
            with torch.autocast(device.type, enabled=False):
                h, assigned = vmap(encode, randomness="error")(weights, buffers, torch.stack(list(images)))
        except RuntimeError as error:
            raise _refusal(error) from None
        # Buffers that the encoder replaced by new tensors are not rows of the stack, and neither are copies.
        for name, buffer in (assigned if first else {**buffers, **assigned}).items():
            # `.data`: an earlier call's backward pass still needs the buffers and would refuse changed ones.
            self._stacked_buffers[name].data[chosen] = buffer
        outputs = list(h.unbind())
        if h.requires_grad:
            self._hooks.append(register_multi_grad_hook(outputs, partial(self._note, rows)))
        return outputs

    def _note(self, rows: Sequence[int], gradients: Sequence[Tensor | None]) -> None:
        """Record which rows of a call a backward pass has reached."""
        self._reached.update(
            row for row, gradient in zip(rows, gradients, strict=True) if gradient is not None
        )

    def pass_on_gradients(self) -> None:
        """Add the gradients of the stacked weights to those of the encoders that losses depended on."""
        for name, stacked in self._stacked_weights.items():
            if stacked.grad is None:
                continue
            gradients = stacked.grad.unbind()
            for row in self._reached:
                weight, own = self._weights[row][name], gradients[row]
                if weight.requires_grad:
                    weight.grad = own if weight.grad is None else weight.grad + own
            stacked.grad = None
        self._reached.clear()
        for hook in self._hooks:  # the hooks and the step's graph reference each other
            hook.remove()
        self._hooks.clear()


def _refusal(error: RuntimeError) -> Exception:
    """Return an error that says why an encoder cannot be stacked; the error itself if it has another cause."""
    reason = first_line(error)
    if "randomness error mode" in reason:
        reason = "it draws random numbers (dropout, stochastic depth)"
    elif "vmap" not in str(error) and "batching rule" not in str(error).lower():
        return error
    return UserError(f"engine.stack cannot be used with this encoder: {reason}; leave out engine.stack")


def _share(tensors: Sequence[Mapping[str, Tensor]], name: str) -> Tensor:
    """Stack the tensors of one name, which become the rows of the result."""
    stacked = torch.stack([each[name].detach() for each in tensors])
    for each, row in zip(tensors, stacked.unbind(), strict=True):
        each[name].data = row
    return stacked
