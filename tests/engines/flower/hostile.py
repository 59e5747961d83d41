"""An objective that spoils updates at some clients in some rounds; travels in the app's folder."""

import time
from typing import ClassVar

import torch

from atoll.objectives.align_uniform import AlignUniform


class Hostile(AlignUniform):
    name: ClassVar[str] = "hostile"

    def after_step(self, context):
        super().after_step(context)
        fault = (context.round, context.client)
        weight = context.networks["encoder"].conv1.weight
        if fault == (2, 0):
            weight.data.fill_(float("nan"))
        if fault == (3, 1):
            for parameter in context.networks.parameters():
                parameter.data.mul_(1000.0)
        if fault == (4, 2) and context.steps == 2:
            weight.data = torch.zeros(1)
        if fault == (5, 3) and context.steps == 1:  # once: it must be free again in round 6
            time.sleep(130)  # beyond the deadline of the round
