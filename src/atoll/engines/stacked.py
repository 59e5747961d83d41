"""Stacked clients: one process trains several clients at once, with their encoders stacked into one.

A GPU needs as many kernels for a stack of small networks as for one of them. Only encoders are stacked; heads,
losses, components and optimisers run for one client after another. Every method therefore works unchanged, and the
weights are those of clients that train one by one, up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from atoll.components.base import Passes
from atoll.components.forwards import encoder_calls
from atoll.components.messages import Slices
from atoll.engines.encoder_stack import EncoderStack
from atoll.engines.interleaved import Interleaved, Member


class Stacked(Interleaved):
    """Trains ``engine.stack`` clients at once."""

    def start(self, constants: Slices) -> None:
        """Create the client sides, each with its own networks."""
        super().start(constants)
        self._stacks: dict[str, EncoderStack] = {}

    def _make_streams(self) -> list[torch.cuda.Stream | None]:
        return [None] * len(self._clients)  # the encoders of all clients form one stack

    def _step(self, active: Sequence[Member]) -> None:
        """Take one step of each client that has a batch left.

        Heads, losses and components draw random numbers in the client's turn. Encoders draw none: a stack refuses
        those that do.
        """
        for member in active:
            member.client.begin_batch(member.batch)
            member.client.optimizer.zero_grad(set_to_none=True)
        with self._clients[0].autocast():
            passes = self._passes(active)
            losses = []
            for member in active:
                with member.turn():
                    losses.append(member.client.loss(member.batch, passes[member.row]))
        if reached := [loss for loss in losses if loss.requires_grad]:
            torch.autograd.backward(reached)
        for stack in self._stacks.values():
            stack.pass_on_gradients()
        for member in active:
            with member.turn():
                member.client.optimizer.step()
                member.client.after_step()

    def _passes(self, active: Sequence[Member]) -> dict[int, Passes]:
        """Run the declared passes of each client, by its row; one call encodes all batches of equal shape."""
        for member in active:
            with member.turn():
                member.client.prepare(member.batch)
        client = self._clients[0]
        passes = {member.row: Passes() for member in active}
        for call in encoder_calls(client.method.forwards, client.joint):
            groups: dict[torch.Size, dict[Member, Tensor]] = {}
            for member in active:
                images = call.batch(member.batch.images)
                groups.setdefault(images.shape, {})[member] = images
            for images_of in groups.values():
                rows = [member.row for member in images_of]
                with call.grad():
                    outputs = self._stack(call.network, active)(rows, list(images_of.values()))
                for member, h in zip(images_of, outputs, strict=True):
                    network, after = member.client.networks_by_name[call.network], member.client.context.after
                    passes[member.row] |= call.features(network, h, after)
        return passes

    def _stack(self, network: str, active: Sequence[Member]) -> EncoderStack:
        """The clients' encoders of one network; a component may make a copy of its networks in any step."""
        encoders = [
            client.networks_by_name[network]["encoder"] for client in self._clients[: active[-1].row + 1]
        ]
        known = self._stacks.get(network)
        if known is None or known.encoders[: len(encoders)] != encoders:
            known = self._stacks[network] = EncoderStack(encoders)
        return known
