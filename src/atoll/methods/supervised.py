"""Supervised learning under FedAvg: the papers' baselines for methods without labels."""

from __future__ import annotations

from atoll.methods.method import Method
from atoll.objectives.cross_entropy import CrossEntropy
from atoll.objectives.metric_learning import Quadruplet, Triplet
from atoll.objectives.supcon import SupCon

FAMILY = "Supervised methods"

FED_SL = Method(
    objective=CrossEntropy(),
    title="FedAvg (supervised)",
    paper="McMahan et al., AISTATS 2017, on labels",
    family=FAMILY,
)

DEC_SL = Method(
    objective=CrossEntropy(augment=True),
    title="Dec-SL",
    paper="Wang et al., Dec-SSL, ICLR 2023, Section 2.1: end-to-end classification",
    family=FAMILY,
)

# Trained like Dec-SL, but evaluated by a probe on the encoder, like the self-supervised methods.
DEC_SLREP = Method(
    objective=CrossEntropy(augment=True),
    title="Dec-SLRep",
    paper="Wang et al., Dec-SSL, ICLR 2023, Section 2.1: Dec-SL's encoder as a representation",
    family=FAMILY,
)

SUPCON = Method(
    objective=SupCon(),
    title="SupCon",
    paper="Khosla et al., NeurIPS 2020, under FedAvg",
    family=FAMILY,
)

TRIPLET = Method(
    objective=Triplet(),
    title="Triplet",
    paper="Hoffer and Ailon, Deep Metric Learning Using Triplet Network, 2015, under FedAvg",
    family=FAMILY,
)

QUADRUPLET = Method(
    objective=Quadruplet(),
    title="Quadruplet",
    paper="Chen et al., Beyond Triplet Loss, CVPR 2017, under FedAvg",
    family=FAMILY,
)
