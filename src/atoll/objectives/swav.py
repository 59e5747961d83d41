"""SwAV: a view predicts the code of another, its balanced assignment to prototypes (Caron et al. 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from atoll.components.base import Batch, ClientContext, Forward, Passes, Setting
from atoll.core.schema import Count, Positive, Whole
from atoll.core.tree import Tree
from atoll.functional import swav, swav_codes, swav_scores
from atoll.objectives.multi_crop import MultiCrop, epochs_done

HEAD = "prototypes"


@dataclass(frozen=True)
class SwAV(MultiCrop):
    """L = mean over the pairs of a global crop u and another crop v of H(q_u, softmax(s_v/τ)).

    s are the cosines of embeddings and prototypes. The codes q of a batch are balanced over the prototypes. A batch
    of few images cannot be: the embeddings of earlier batches, a queue, are then balanced with it. The queue is
    client state and never leaves the client.

    Attributes:
        prototypes: K.
        temperature: τ.
        epsilon: ε, the smoothness of the codes.
        iterations: Sinkhorn iterations of the codes.
        queue: Number of earlier embeddings of each global crop, which count once the queue is full; 0 for none.
        queue_epochs: Number of local epochs, counted over the rounds, before the queue counts.
        fixed_epochs: Number of local epochs, counted over the rounds, in which the prototypes do not train.
    """

    name: ClassVar[str] = "swav"
    source: ClassVar[str] = "Caron et al. 2020, Eqs. 1-6"
    least_loss: ClassVar[float] = 0.0
    prototypes: Count = 3000
    temperature: Positive = 0.1
    epsilon: Positive = 0.05
    iterations: Count = 3
    queue: Whole = 3840
    queue_epochs: Whole = 15
    fixed_epochs: Whole = 1

    @property
    def keeps(self) -> tuple[str, ...]:
        """Name the retained client state."""
        return ("a queue of normalised embeddings of both views",) if self.queue else ()

    def heads(self, setting: Setting) -> dict[str, nn.Module]:
        """Build the prototypes."""
        return {HEAD: nn.Linear(setting.embedding_dim, self.prototypes, bias=False)}

    def forwards(self) -> Sequence[Forward]:
        """Pass all crops through the local networks."""
        return self.crops

    def start(self, context: ClientContext) -> None:
        """Restore or empty the queue, and give the prototypes, a mean of the clients', length 1."""
        scope = context.of(self)
        kept = context.retained(self)
        empty = torch.zeros(2, 0, context.setting.embedding_dim)
        scope.queue, scope.embeddings = (empty if kept is None else kept).to(context.device), []
        _to_length_1(context)

    def loss(self, context: ClientContext, batch: Batch, passes: Passes) -> Tensor:
        """Cross-entropies of all crops' predictions under the codes of the global crops (Eqs. 1, 2 and 6)."""
        scope, n, epoch = context.of(self), len(batch.indices), epochs_done(context, batch)
        trained = context.networks[HEAD].get_parameter("weight")
        prototypes = trained.detach()
        z = torch.cat([passes[crops].z for crops in self.crops]).view(-1, n, context.setting.embedding_dim)
        scores = swav_scores(z, prototypes if epoch < self.fixed_epochs else trained)
        codes_of = scores[:2].detach()
        if self.queue:
            scope.embeddings.append(normalize(z[:2].detach().to(prototypes), dim=2))
            if scope.queue.shape[1] == self.queue and epoch >= self.queue_epochs:
                codes_of = torch.cat([codes_of, swav_scores(scope.queue, prototypes)], dim=1)
        codes = [swav_codes(view, self.epsilon, self.iterations)[:n] for view in codes_of]
        return swav(scores, torch.stack(codes), self.temperature)

    def after_step(self, context: ClientContext) -> None:
        """Give the prototypes length 1 again, and enqueue the step's embeddings in place of the oldest."""
        scope = context.of(self)
        _to_length_1(context)
        if self.queue:
            scope.queue = torch.cat([scope.queue, *scope.embeddings], dim=1)[:, -self.queue :]
            scope.embeddings = []

    def keep(self, context: ClientContext) -> Tree:
        """Return the queue as client state."""
        return context.of(self).queue if self.queue else None


@torch.no_grad()
def _to_length_1(context: ClientContext) -> None:
    weight = context.networks[HEAD].get_parameter("weight")
    weight.copy_(normalize(weight, dim=1))
