"""L-DAWA: layer-wise divergence-aware weight aggregation (Rehman et al., ICCV 2023), and what it compares with.

Clients train as under FedAvg, with SimCLR (or Barlow Twins: ``method.objective=barlow_twins``). The server scales
each layer of an update by its cosine to the global model's (see `atoll.aggregation.dawa`). The variants weigh the
clients by samples or by loss; _FedU adds FedU's merge at the client.
"""

from __future__ import annotations

from dataclasses import replace

from atoll.aggregation.dawa import LDAWA, MDAWA
from atoll.aggregation.loss_weighted import LossWeighted
from atoll.methods.fedu import FedU
from atoll.methods.method import Method
from atoll.objectives.simclr import SimCLR

L_DAWA = Method(
    objective=SimCLR(),
    aggregation=LDAWA(),
    title="L-DAWA",
    paper="Rehman et al., L-DAWA, ICCV 2023",
    family="Aggregation",
)
L_DAWA_FEDAVG = replace(L_DAWA, aggregation=LDAWA(weights="samples"), title="L-DAWA over FedAvg")
L_DAWA_LOSS = replace(L_DAWA, aggregation=LDAWA(weights="loss"), title="L-DAWA over Loss")
L_DAWA_FEDU = replace(L_DAWA_FEDAVG, merge=FedU(), title="L-DAWA over FedU")
M_DAWA = replace(L_DAWA, aggregation=MDAWA(), title="M-DAWA")

FED_LOSS = Method(
    objective=SimCLR(),
    aggregation=LossWeighted(),
    title="Loss",
    paper="Gao et al., ICASSP 2022, as compared with in L-DAWA",
    family="Aggregation",
)
