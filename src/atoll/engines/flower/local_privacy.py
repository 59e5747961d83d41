"""Local differential privacy: a client clips its step and adds noise before anything leaves it.

    w_k ← w + min(1, C/‖Δ_k‖) Δ_k + N(0, z²C²);  Δ_k = w_k − w

This is the Gaussian mechanism (Dwork and Roth 2014, Appendix A) at the client, so nobody needs to be trusted, not
even the server. Any two sets of images give clipped steps at a distance of at most 2C, so ε is that of a Gaussian
with z/2 (`gaussian_epsilon`), and rounds compose. ε covers only the weights: the number of images or batches, which
determines an update's weight, leaves without noise, and so do the facts that the site sends when it enrols. The
noise of K clients averages to zC/√K per weight; noise added by the server (`atoll.aggregation.private`) would be
zC/K.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch

from atoll.aggregation.private import gaussian_epsilon, joint_norm, uniform_draws
from atoll.components.base import Setting
from atoll.core.config import Options
from atoll.core.extras import missing
from atoll.core.schema import Above, Below, Positive
from atoll.core.tree import Weights
from atoll.methods.method import Method


@dataclass(frozen=True)
class LocalPrivacy(Options, section="policy.privacy"):
    """A client's own differential privacy.

    Attributes:
        clip: C, the norm to which a step is clipped.
        noise_multiplier: z, the noise in units of C.
        delta: δ at which ε is reported.
    """

    clip: Positive
    noise_multiplier: Positive
    delta: Annotated[float, Above(0), Below(1)] = 1e-5

    def refuse(self, method: Method, setting: Setting) -> str | None:
        """Describe what would leave the client without noise; None if nothing would."""
        if setting.train.bn_buffers == "average":
            return "sends BatchNorm's running statistics; set train.bn_buffers = 'local' or 'leave'"
        for component in method.components:
            if component.egress:
                return f"sends more than weights ({component.name!r}: {'; '.join(component.egress)})"
        if "loss" in method.aggregation.statistics:
            return f"sends the loss, which {method.aggregation.name!r} needs"
        if why := missing("dp_accounting", "dp", "the accountant of ε"):
            return f"cannot state ε: {why}"
        return None

    def apply(self, weights: Weights, received: Weights) -> Weights:
        """Return the weights after the clipped and noisy step; the noise comes from the operating system."""
        names = [name for name, weight in weights.items() if weight.is_floating_point()]
        step = [weights[name].cpu() - received[name].cpu() for name in names]
        norm = joint_norm(step) if step else 0.0
        if not math.isfinite(norm):
            # Whether training diverged must not be seen either: no step, and the noise.
            step = [torch.zeros_like(part) for part in step]
        elif norm > self.clip:
            torch._foreach_mul_(step, self.clip / norm)
        scale = self.noise_multiplier * self.clip
        # Tensors without noise must reveal nothing about the images: they leave as they were received.
        noisy = {name: received[name].cpu() for name in weights}
        for name, part in zip(names, step, strict=True):
            draws = uniform_draws(secrets.token_bytes(32), part.numel()).reshape(part.shape)
            moved = part.double() + scale * torch.special.ndtri(draws)
            noisy[name] = (noisy[name].double() + moved).to(part.dtype)
        return noisy

    def epsilon(self, rounds: int) -> float:
        """Return ε after this number of rounds, at least one, between any two sets of images."""
        return joint_epsilon([self.noise_multiplier] * rounds, self.delta)


def joint_epsilon(noise_multipliers: Sequence[float], delta: float) -> float:
    """Compute ε of one or more updates with noise of different size, between any two sets of images.

    Gaussian mechanisms with z_k compose to one with 1/z² = Σ_k 1/z_k² (their Rényi divergences add up).

    Args:
        noise_multipliers: z_k, the noise of each update in units of its clipping norm.
        delta: δ at which ε is computed.
    """
    together = math.fsum(z**-2 for z in noise_multipliers) ** -0.5
    return gaussian_epsilon(1.0, together / 2, 1, delta)
