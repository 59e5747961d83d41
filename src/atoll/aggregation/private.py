"""Client-level central differential privacy: clipped updates, a uniform mean, Gaussian noise, an accountant.

The guarantee protects a client's whole contribution to the models that the server publishes, against anyone who
sees those models. The server is trusted to add the noise (McMahan et al. 2018; Abadi et al. 2016).
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from atoll.components.base import Aggregation, Models, Setting, Update, UpdateGeometry
from atoll.core.extras import missing
from atoll.core.schema import Above, Below, Positive
from atoll.core.tree import Weights


@dataclass(frozen=True)
class PrivateFedAvg(Aggregation):
    """w ← w + (Σ_k min(1, C/‖Δ_k‖) Δ_k + N(0, z²C²)) / (qK); Δ_k = w_k − w, each client with probability q.

    The cohort is a Poisson sample, as the accountant assumes, and the divisor is its expected size, so neither
    depends on which clients take part. BatchNorm's running statistics are not aggregated: clients retain them, or
    they do not change. Every client knows the recipe and therefore the seed, so noise and sample are drawn with
    keys from the operating system, and a private run is not repeatable. A repeated round would spend privacy again,
    so each round is saved before its model is published. The guarantee does not cover the losses in the log.

    Attributes:
        clip: C, the norm to which an update is clipped.
        noise_multiplier: z, the noise in units of C.
        delta: δ at which ε is reported; choose it well below 1 / clients.
        secret: Seed of the noise and the sample. It makes a run repeatable, and voids its privacy against anyone
            who knows the seed.
    """

    name: ClassVar[str] = "private_fedavg"
    source: ClassVar[str] = "McMahan et al. 2018, Algorithm 1"
    keeps_updates: ClassVar[bool] = False
    only_weights: ClassVar[bool] = True
    clips: ClassVar[bool] = True
    hides_updates: ClassVar[bool] = True
    clip: Positive = 1.0
    noise_multiplier: Positive = 1.0
    delta: Annotated[float, Above(0), Below(1)] = 1e-5
    secret: int | None = None

    def refuse(self, setting: Setting) -> str | None:
        """Refuse settings under which the guarantee would not hold."""
        if setting.train.bn_buffers == "average":
            return (
                "BatchNorm's running statistics would leave the clients without noise; "
                "set train.bn_buffers = 'local' or 'leave'"
            )
        if setting.checkpoint_every > 1:
            return (
                f"engine.checkpoint_every is {setting.checkpoint_every}: after a kill, rounds would run "
                "again with different noise, which ε does not include; set it to 1"
            )
        return missing("dp_accounting", "dp", "the accountant of ε")

    def cohort(self, setting: Setting, round: int) -> list[int]:
        """Draw a Poisson sample of the clients."""
        draws = uniform_draws(self._key("sample", round), setting.num_clients)
        return torch.nonzero(draws < setting.train.participation).flatten().tolist()

    def fewest_clients(self, setting: Setting) -> int:
        """Return 0: a Poisson sample may be empty, unless all clients take part."""
        return setting.num_clients if setting.train.participation == 1 else 0

    def spent(self, setting: Setting, round: int) -> dict[str, float]:
        """Return ε of all rounds up to this one."""
        epsilon = gaussian_epsilon(setting.train.participation, self.noise_multiplier, round, self.delta)
        return {"epsilon": epsilon, "delta": self.delta}

    def open(self, models: Models, setting: Setting, round: int, scratch: Path | None) -> PrivateFold:
        """Start a round's sum."""
        expected = setting.train.participation * setting.num_clients
        return PrivateFold(models["global"], self, expected, self._key("noise", round), setting.local_only)

    def _key(self, purpose: str, round: int) -> bytes:
        if self.secret is None:
            return secrets.token_bytes(32)
        return hashlib.sha256(f"{self.secret}/{purpose}/{round}".encode()).digest()


class PrivateFold:
    """The noisy mean of a round."""

    def __init__(
        self,
        current: Weights,
        options: PrivateFedAvg,
        expected: float,
        key: bytes,
        local_only: frozenset[str],
    ) -> None:
        self._current = current
        self._options = options
        self._expected = expected
        self._key = key
        self._names = [
            name for name, tensor in current.items() if tensor.is_floating_point() and name not in local_only
        ]
        self._sum = [torch.zeros_like(current[name]) for name in self._names]

    def add(self, client: int, update: Update, geometry: UpdateGeometry) -> None:
        """Fold in one client's step; tensors that it did not send have step 0."""
        weights = update["weights"]
        step = [weights.get(name, self._current[name]) - self._current[name] for name in self._names]
        norm = joint_norm(step)
        if norm > self._options.clip:
            torch._foreach_mul_(step, self._options.clip / norm)
        torch._foreach_add_(self._sum, step)

    def close(self) -> Models:
        """Return the model after the noisy mean step."""
        scale = self._options.noise_multiplier * self._options.clip
        moved = dict(self._current)
        for name, total in zip(self._names, self._sum, strict=True):
            uniform = uniform_draws(self._key + name.encode(), total.numel()).reshape(total.shape)
            step = (total.double() + scale * torch.special.ndtri(uniform)) / self._expected
            moved[name] = (self._current[name].double() + step).to(total.dtype)
        return {"global": moved}


def uniform_draws(key: bytes, count: int) -> Tensor:
    """Draw (count,) float64 values in (0, 1) from SHAKE-256 with a key.

    PyTorch's generator uses only 32 bits of a seed, so an attacker who sees two models could try all seeds.
    """
    words = np.frombuffer(hashlib.shake_256(key).digest(8 * count), "<u8")
    return torch.from_numpy(((words >> 12) + 0.5) / 2**52)


def joint_norm(tensors: list[Tensor]) -> float:
    """Norm of all tensors as one vector."""
    return float(torch.stack(torch._foreach_norm(tensors)).double().square().sum().sqrt())


@lru_cache(maxsize=4096)
def gaussian_epsilon(rate: float, noise_multiplier: float, rounds: int, delta: float) -> float:
    """Compute ε: Rényi accounting (Mironov et al. 2019), Poisson-sampled Gaussian, add or remove one client."""
    import dp_accounting
    from dp_accounting import rdp

    event: Any = dp_accounting.GaussianDpEvent(noise_multiplier)
    orders: list[float] = [*range(2, 65), 80, 96, 128, 192, 256, 512]  # integer orders have a closed form
    if rate < 1:
        event = dp_accounting.PoissonSampledDpEvent(rate, event)
    else:
        # Without sampling all orders have one, and the bound of a large ε is least below order 2.
        orders += [1 + hundredths / 100 for hundredths in range(1, 100)]
    accountant = rdp.RdpAccountant(orders)
    accountant.compose(event, rounds)
    return float(accountant.get_epsilon(delta))
