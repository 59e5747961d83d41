"""The forward passes of a training step: each declared pass runs once, each head on first access."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Forward:
    """One forward pass that a component needs.

    Attributes:
        images: ``"view1"``, ``"view2"``, ``"view3"`` (augmented), ``"image"`` (without augmentation), ``"other"``
            (a view of another, random image of the client), or a name that the component's `Component.inputs`
            returns.
        network: ``"local"`` (trained), or the name of a copy that a component made with `ClientContext.frozen`.
    """

    images: str
    network: str = "local"


# Functions that are applied to a head's output before any loss reads it, by the head's name.
After = Mapping[str, Callable[[Tensor], Tensor]]


class Features:
    """Outputs of networks for some images: the representation h, and the outputs of the heads on demand.

    A head runs once, when a component first reads its output; other components reuse the output.
    """

    def __init__(self, networks: nn.ModuleDict, h: Tensor, after: After) -> None:
        self._networks = networks
        self._outputs: dict[str, Tensor] = {"h": h}
        self._after = after

    @property
    def h(self) -> Tensor:
        """The representation f(x), (N, d_h)."""
        return self.head("h")

    @property
    def z(self) -> Tensor:
        """The embedding g(h), (N, d)."""
        return self.head("projector", of="h")

    @property
    def q(self) -> Tensor:
        """The prediction of the embedding, (N, d)."""
        return self.head("predictor", of="projector")

    def head(self, name: str, of: str = "h") -> Tensor:
        """Return the output of the head ``name`` for the output ``of`` (``"h"`` or another head's name)."""
        if name not in self._outputs:
            if name not in self._networks:
                raise KeyError(
                    f"no component of this method adds the head {name!r}; return it from heads(setting)"
                )
            output = self._networks[name](self.head(of))
            self._outputs[name] = self._after[name](output) if name in self._after else output
        return self._outputs[name]


class _Rows(Features):
    """One view of a joint batch: every output is computed for both views at once, then sliced."""

    def __init__(self, both: Features, rows: slice[int | None, int | None, None]) -> None:
        self._both = both
        self._rows = rows

    def head(self, name: str, of: str = "h") -> Tensor:
        return self._both.head(name, of)[self._rows]


VIEWS = (Forward("view1"), Forward("view2"))  # both views through the networks under training


class Passes(dict[Forward, Features]):
    """The outputs of a step's passes."""

    def __missing__(self, forward: Forward) -> Features:
        raise KeyError(f"no component of this method declares the pass {forward}; return it from forwards()")


@dataclass(frozen=True)
class EncoderCall:
    """One call of an encoder, for one declared pass or for both views in one batch.

    Attributes:
        network: The network's name, as that of a `Forward`.
        passes: The declared passes whose images are in its batch, in order.
    """

    network: str
    passes: tuple[Forward, ...]

    def batch(self, images: Mapping[str, Tensor]) -> Tensor:
        """The encoder's input, from the images of a batch by name."""
        parts = [images[forward.images] for forward in self.passes]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def grad(self) -> torch.set_grad_enabled:
        """Context of the call: copies of networks are not trained."""
        return torch.set_grad_enabled(self.network == "local")

    def features(self, network: nn.ModuleDict, h: Tensor, after: After) -> dict[Forward, Features]:
        """The passes' outputs, given the call's result."""
        features = Features(network, h, after)
        if len(self.passes) == 1:
            return {self.passes[0]: features}
        rows = len(h) // len(self.passes)
        return {
            forward: _Rows(features, slice(i * rows, (i + 1) * rows)) for i, forward in enumerate(self.passes)
        }


def encoder_calls(forwards: Sequence[Forward], joint: bool) -> list[EncoderCall]:
    """Calls for the declared passes, each pass once, in order; with ``joint``, one call processes both views."""
    calls: list[EncoderCall] = []
    for forward in forwards:
        if any(forward in call.passes for call in calls):
            continue
        pair = tuple(Forward(view.images, forward.network) for view in VIEWS)
        together = joint and forward in pair and all(one in forwards for one in pair)
        calls.append(EncoderCall(forward.network, pair if together else (forward,)))
    return calls


def run_forwards(
    forwards: Sequence[Forward],
    networks: Mapping[str, nn.ModuleDict],
    images: Mapping[str, Tensor],
    joint: bool,
    after: After,
    encode: Callable[[nn.Module, Tensor], Tensor] = nn.Module.__call__,
) -> Passes:
    """Run each declared pass once, in order.

    Args:
        forwards: The passes.
        networks: Networks by the names that the passes give them.
        images: Images of a batch by name.
        joint: Whether a network processes both views in one batch.
        after: Functions that are applied to the outputs of heads, by the head's name.
        encode: Computes an encoder's output for images.

    Shape:
        images: (N, C, H, W) each.
    """
    passes = Passes()
    for call in encoder_calls(forwards, joint):
        network = networks[call.network]
        with call.grad():
            h = encode(network["encoder"], call.batch(images))
        passes |= call.features(network, h, after)
    return passes
