"""Self-supervised objectives under plain FedAvg: the baselines of all five papers."""

from __future__ import annotations

from atoll.methods.method import Method
from atoll.objectives.align_uniform import AlignUniform
from atoll.objectives.simclr import SimCLR

FAMILY = "Self-supervised learning under FedAvg"

FED_ALIGN_UNIFORM = Method(
    objective=AlignUniform(),
    title="FedAlignUniform",
    paper="Wang and Isola, ICML 2020, under FedAvg",
    family=FAMILY,
)

FED_SIMCLR = Method(
    objective=SimCLR(),
    title="FedSimCLR",
    paper="Chen et al., ICML 2020, under FedAvg",
    family=FAMILY,
)
