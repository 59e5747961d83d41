"""EmInspector: leave out clients whose models embed a few images too similarly (Qian et al. 2024).

    s_c(x)  = Σ_j cos(f_c(x), f_j(x))                     for each inspection image x, over the round's clients j
    score_c = Σ_x (+1 if s_c(x) ≥ mean over clients of s(x), else −1)
    w ← the mean of the models with score_c ≤ 0; unchanged if there is none

Attackers who implant the same backdoor into the model that they received embed images similarly, while honest
clients move apart. The text of the paper is not available to us; this implementation follows the released code,
which inspects the normalised features of the backbone in eval mode and weights the remaining clients equally.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar

import tomli_w
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from atoll.aggregation.disk_buffer import DiskBuffer
from atoll.aggregation.robust import CollectingFold
from atoll.components.base import Aggregation, Models, Setting, Update, UpdateGeometry, seeded
from atoll.core.config import build
from atoll.core.rng import stream
from atoll.core.schema import Count
from atoll.core.tree import Tree, Weights
from atoll.data.options import DataOptions
from atoll.data.sources import load_data
from atoll.models import build_encoder

PREFIX = "encoder."


@dataclass(frozen=True)
class EmInspector(Aggregation):
    """The mean of the models that do not embed the inspection images too similarly.

    Without attackers, some honest clients are left out too, because a score is relative to the mean.

    Attributes:
        data: The inspection images at the server, as a separate ``[data]`` table; if it is not set, they are noise.
            The released code takes images of any kind. Images are scaled to [0, 1] and not normalised further.
        size: Number of inspection images.
    """

    name: ClassVar[str] = "em_inspector"
    source: ClassVar[str] = "Qian et al. 2024 (EmInspector), released code (our reading)"
    keeps_updates: ClassVar[bool] = False
    whole_cohort: ClassVar[bool] = True
    data: dict[str, Any] = field(default_factory=dict)
    size: Count = 10

    @property
    def least_updates(self) -> int:
        """Return 3: two embeddings are equally close to their mean, so both clients would be suspected."""
        return 3

    def refuse(self, setting: Setting) -> str | None:
        """Refuse cohorts of fewer than three clients, and encoders of which clients send only a part."""
        if too_few := super().refuse(setting):
            return too_few
        if any(name.startswith(PREFIX) for name in setting.base_names):
            return (
                "'em_inspector' embeds images with the clients' encoders, of which they send a part with "
                "model.freeze, model.lora_rank or method.share; let the whole encoder train and be shared, or "
                "choose another aggregation"
            )
        return None

    def init(self, setting: Setting) -> Tree:
        """Load the inspection images, so that an error in ``data`` is reported before the first round."""
        self._images(setting)
        return None

    def open(self, models: Models, setting: Setting, round: int, scratch: Path | None) -> InspectingFold:
        """Start to collect a round's updates and their embeddings."""
        channels, size, _ = setting.image_shape
        encoder = seeded(0, lambda: build_encoder(setting.model, channels, size)).eval()
        return InspectingFold(models["global"], encoder, self._images(setting), scratch)

    def _images(self, setting: Setting) -> Tensor:
        return inspection_images(tomli_w.dumps(self.data), self.size, setting.image_shape, setting.seed)


class InspectingFold(CollectingFold):
    """Collection of a round's updates, with each model's embeddings of the inspection images."""

    def __init__(self, current: Weights, encoder: nn.Module, images: Tensor, scratch: Path | None) -> None:
        super().__init__(current, partial(_mean_of_unsuspected, self), scratch)
        self._received = current
        self._encoder = encoder
        self._images = images
        self.embeddings: list[Tensor] = []

    @torch.no_grad()
    def add(self, client: int, update: Update, geometry: UpdateGeometry) -> None:
        """Write one client's model to disk, and embed the images with it."""
        super().add(client, update, geometry)
        weights: Mapping[str, Tensor] = {**self._received, **update["weights"]}
        own = {name.removeprefix(PREFIX): w for name, w in weights.items() if name.startswith(PREFIX)}
        self._encoder.load_state_dict(own)
        self.embeddings.append(normalize(self._encoder(self._images).double(), dim=1))


def _mean_of_unsuspected(fold: InspectingFold, updates: DiskBuffer, current: Weights) -> Weights:
    if not fold.embeddings:
        return {}
    embeddings = torch.stack(fold.embeddings)
    # If a model's embeddings contain NaN, no comparison would suspect anyone, so the model is left out.
    finite = torch.nonzero(embeddings.isfinite().flatten(1).all(dim=1)).flatten()
    kept = finite[suspicion(embeddings[finite]) <= 0]
    return updates.map(lambda rows, block: rows[kept].double().mean(dim=0)) if len(kept) else {}


def suspicion(embeddings: Tensor) -> Tensor:
    """Compute the scores of all clients: above 0 for a suspected one.

    Shape:
        embeddings: (K, N, d) with rows of length 1; result: (K,) int64.

    Example:
        >>> import torch
        >>> from atoll.aggregation.em_inspector import suspicion
        >>> suspicion(torch.eye(3)[[0, 0, 1, 2]][:, None])
        tensor([ 1,  1, -1, -1])
    """
    similarities = torch.einsum("cnd,nd->cn", embeddings, embeddings.sum(dim=0))
    return torch.where(similarities >= similarities.mean(dim=0), 1, -1).sum(dim=1)


@lru_cache(maxsize=4)
def inspection_images(data: str, count: int, shape: tuple[int, int, int], seed: int) -> Tensor:
    """Load the inspection images, or draw noise; ``data`` is the TOML of a ``[data]`` table.

    Shape:
        Result: float32 (N, C, H, W) in [0, 1].
    """
    table = tomllib.loads(data)
    draws = stream(seed, "inspection")
    if not table:
        return torch.rand((count, *shape), generator=draws)
    channels, size, _ = shape
    options = build(DataOptions, {**table, "channels": channels, "image_size": size})
    images = load_data(options, seed).train.images
    chosen = torch.randperm(len(images), generator=draws)[:count]
    return images.gather(chosen).float() / 255
