"""Self-supervised objectives under plain FedAvg: the baselines of all five papers."""

from __future__ import annotations

from atoll.methods.method import Method
from atoll.objectives.align_uniform import AlignUniform
from atoll.objectives.autoencoder import Autoencoder
from atoll.objectives.barlow_twins import BarlowTwins
from atoll.objectives.byol import BYOL
from atoll.objectives.dino import DINO
from atoll.objectives.mae import MAE
from atoll.objectives.moco import MoCo
from atoll.objectives.rotation import Rotation
from atoll.objectives.sigreg import SIGReg
from atoll.objectives.simclr import SimCLR
from atoll.objectives.simsiam import SimSiam
from atoll.objectives.swav import SwAV
from atoll.objectives.vicreg import VICReg

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

FED_BARLOW = Method(
    objective=BarlowTwins(),
    title="FedBarlow",
    paper="Zbontar et al., Barlow Twins, ICML 2021, under FedAvg",
    family=FAMILY,
)

FED_VICREG = Method(
    objective=VICReg(),
    title="FedVICReg",
    paper="Bardes et al., VICReg, ICLR 2022, under FedAvg",
    family=FAMILY,
)

FED_BYOL = Method(
    objective=BYOL(),
    title="FedBYOL",
    paper="Grill et al., Bootstrap Your Own Latent, NeurIPS 2020, under FedAvg",
    family=FAMILY,
)

FED_SIMSIAM = Method(
    objective=SimSiam(),
    title="FedSimSiam",
    paper="Chen and He, Exploring Simple Siamese Representation Learning, CVPR 2021, under FedAvg",
    family=FAMILY,
)

FED_MOCO = Method(
    objective=MoCo(),
    title="FedMoCo",
    paper="Chen et al., Improved Baselines with Momentum Contrastive Learning, 2020 (v2), under FedAvg",
    family=FAMILY,
)

FED_MOCO_V1 = Method(
    objective=MoCo(temperature=0.07),
    title="FedMoCo v1",
    paper="He et al., Momentum Contrast, CVPR 2020, under FedAvg",
    family=FAMILY,
)

FED_SIGREG = Method(
    objective=SIGReg(),
    title="FedSIGReg",
    paper="Balestriero and LeCun, LeJEPA, 2025, under FedAvg",
    family=FAMILY,
)

FED_DINO = Method(
    objective=DINO(),
    title="FedDINO",
    paper="Caron et al., Emerging Properties in Self-Supervised Vision Transformers, ICCV 2021, under FedAvg",
    family=FAMILY,
)

FED_SWAV = Method(
    objective=SwAV(),
    title="FedSwAV",
    paper="Caron et al., Contrasting Cluster Assignments, NeurIPS 2020, under FedAvg",
    family=FAMILY,
)

FED_MAE = Method(
    objective=MAE(),
    title="FedMAE",
    paper="He et al., Masked Autoencoders, CVPR 2022, under FedAvg as in Dec-SSL",
    family=FAMILY,
)

FED_PR = Method(
    objective=Rotation(),
    title="FedPR",
    paper="Gidaris et al., Rotation prediction, ICLR 2018, under FedAvg as in FedCA",
    family=FAMILY,
)

FED_AE = Method(
    objective=Autoencoder(),
    title="FedAE",
    paper="An autoencoder under FedAvg, as in FedCA",
    family=FAMILY,
)
