"""Server optimisers and robust aggregation, with clients that train with AlignUniform."""

from __future__ import annotations

from atoll.aggregation.robust import Median, MultiKrum, TrimmedMean
from atoll.aggregation.server_steps import FedAdam, FedAvgM
from atoll.methods.method import Method
from atoll.objectives.align_uniform import AlignUniform

FEDAVGM = Method(
    objective=AlignUniform(),
    server=FedAvgM(),
    title="FedAvgM",
    paper="Hsu et al., Measuring the Effects of Non-Identical Data Distribution, 2019",
    family="Aggregation",
)

FEDADAM = Method(
    objective=AlignUniform(),
    server=FedAdam(),
    title="FedAdam",
    paper="Reddi et al., Adaptive Federated Optimization, ICLR 2021",
    family="Aggregation",
)

MEDIAN = Method(
    objective=AlignUniform(),
    aggregation=Median(),
    title="Coordinate median",
    paper="Yin et al., Byzantine-Robust Distributed Learning, ICML 2018",
    family="Aggregation",
)

TRIMMED_MEAN = Method(
    objective=AlignUniform(),
    aggregation=TrimmedMean(),
    title="Trimmed mean",
    paper="Yin et al., Byzantine-Robust Distributed Learning, ICML 2018",
    family="Aggregation",
)

MULTI_KRUM = Method(
    objective=AlignUniform(),
    aggregation=MultiKrum(),
    title="Multi-Krum",
    paper="Blanchard et al., Machine Learning with Adversaries, NeurIPS 2017",
    family="Aggregation",
)
