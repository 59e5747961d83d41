"""DINO: self-distillation of a momentum teacher's centred, sharpened outputs (Caron et al. 2021)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, normalize

from atoll.components.base import Batch, ClientContext, Forward, Passes, Setting
from atoll.core.schema import Count, Momentum, Positive, Whole
from atoll.core.tree import Tree
from atoll.functional import dino, moving_centre
from atoll.objectives.momentum import encoding_weights, follow, start_target
from atoll.objectives.multi_crop import MultiCrop, epochs_done

TEACHER = (Forward("view1", "dino_teacher"), Forward("view2", "dino_teacher"))
HEAD = "prototypes"


class Prototypes(nn.Linear):
    """The last layer of DINO's head: cosines of embeddings and K prototypes.

    It is a linear layer without bias on normalised inputs, whose weight normalisation has the fixed length 1.

    Shape:
        - Input: (N, d)
        - Output: (N, K)
    """

    def __init__(self, width: int, count: int) -> None:
        super().__init__(width, count, bias=False)

    def forward(self, z: Tensor, fixed: bool = False) -> Tensor:
        """Compute the cosines; with ``fixed``, no gradient reaches the prototypes."""
        weight = self.weight.detach() if fixed else self.weight
        return linear(normalize(z, dim=1), normalize(weight, dim=1))


@dataclass(frozen=True)
class DINO(MultiCrop):
    """L = mean over the pairs of a global crop u and another crop v of H(softmax((t_u − c)/τ_t), softmax(s_v/τ_s)).

    Student and teacher see the global crops, and only the student sees the local ones. The teacher follows the
    student, and the centre c follows the mean of the teacher's outputs.

    Attributes:
        local_crops: Number of local crops of an image; 0 for the two views alone.
        prototypes: K, the outputs of the head; 65,536 in the paper.
        student_temperature: τ_s.
        teacher_temperature: τ_t, after the warm-up.
        warmup_temperature: τ_t in the first round, from which it rises linearly.
        warmup_rounds: Number of rounds of the warm-up; in the paper, 30 epochs.
        momentum: Momentum m of the teacher in the first round.
        final_momentum: Momentum of the teacher after ``horizon`` rounds, to which m rises with a cosine.
        horizon: R, the rounds over which m rises; 0 for all rounds of the run.
        centre_momentum: Momentum of the centre.
        fixed_epochs: Number of local epochs, counted over the rounds, in which the prototypes do not train.
        target: The teacher at the start of a round: the one that the client retained from its last round
            (``"kept"``), or a copy of the student at the start of this round (``"reset"``). The centre is retained
            in both cases.
    """

    name: ClassVar[str] = "dino"
    source: ClassVar[str] = "Caron et al. 2021, Eqs. 1-4"
    least_loss: ClassVar[float] = 0.0
    local_crops: Whole = 6
    prototypes: Count = 4096
    student_temperature: Positive = 0.1
    teacher_temperature: Positive = 0.07
    warmup_temperature: Positive = 0.04
    warmup_rounds: Whole = 30
    momentum: Momentum = 0.996
    final_momentum: Momentum = 1.0
    horizon: Whole = 0
    centre_momentum: Momentum = 0.9
    fixed_epochs: Whole = 1
    target: Literal["kept", "reset"] = "kept"

    @property
    def keeps(self) -> tuple[str, ...]:
        """Name the retained client state: the centre, and the teacher unless each round resets it."""
        centre = "the mean of its teacher's outputs"
        return ("its teacher network", centre) if self.target == "kept" else (centre,)

    @property
    def follows_rounds(self) -> bool:
        """Whether the momentum rises over all rounds of the run."""
        return not self.horizon and self.momentum != self.final_momentum

    def heads(self, setting: Setting) -> dict[str, nn.Module]:
        """Build the prototypes."""
        return {HEAD: Prototypes(setting.embedding_dim, self.prototypes)}

    def forwards(self) -> Sequence[Forward]:
        """Pass all crops through the local networks, and the global crops through the teacher."""
        return (*self.crops, *TEACHER)

    def start(self, context: ClientContext) -> None:
        """Restore or initialise teacher and centre, and set the schedules' values of this round."""
        scope, rounds = context.of(self), self.horizon or max(context.setting.train.rounds, 1)
        kept = context.retained(self)
        teacher = kept["teacher"] if kept and self.target == "kept" else None
        scope.teacher = start_target(context, "dino_teacher", teacher)
        scope.centre = (kept["centre"] if kept else torch.zeros(self.prototypes)).to(context.device)
        scope.outputs = []
        done = context.round - 1
        falling = 0.5 * (1 + math.cos(math.pi * min(done / rounds, 1.0)))
        scope.momentum = self.final_momentum - (self.final_momentum - self.momentum) * falling
        warm = min(done / self.warmup_rounds, 1.0) if self.warmup_rounds else 1.0
        scope.temperature = (1 - warm) * self.warmup_temperature + warm * self.teacher_temperature

    def loss(self, context: ClientContext, batch: Batch, passes: Passes) -> Tensor:
        """Cross-entropies of the student's outputs under the teacher's (Eqs. 1-3)."""
        scope, n = context.of(self), len(batch.indices)
        fixed = epochs_done(context, batch) < self.fixed_epochs
        outputs = context.networks[HEAD](torch.cat([passes[crops].z for crops in self.crops]), fixed)
        targets = torch.stack([passes[view].head(HEAD, of="projector") for view in TEACHER])
        scope.outputs.append(targets)
        return dino(
            outputs.unflatten(0, (-1, n)),
            targets,
            scope.centre,
            self.student_temperature,
            scope.temperature,
        )

    def after_step(self, context: ClientContext) -> None:
        """Move the teacher towards the student, and the centre towards the teacher's outputs (Eq. 4)."""
        scope = context.of(self)
        follow(scope.teacher, context.networks, scope.momentum)
        scope.centre = moving_centre(scope.centre, torch.cat(scope.outputs, dim=1), self.centre_momentum)
        scope.outputs = []

    def keep(self, context: ClientContext) -> Tree:
        """Return the centre, and the teacher's weights unless each round resets it, as client state."""
        scope = context.of(self)
        teacher = {"teacher": encoding_weights(context, scope.teacher, HEAD)} if self.target == "kept" else {}
        return {"centre": scope.centre, **teacher}
