"""Registry of all components and methods by name, and the construction of a `Method` from a recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from atoll.aggregation.em_inspector import EmInspector
from atoll.aggregation.fedavg import FedAvg
from atoll.aggregation.loss_weighted import LossWeighted
from atoll.aggregation.private import PrivateFedAvg
from atoll.aggregation.robust import Median, MultiKrum, TrimmedMean
from atoll.aggregation.secure_sum import SecureSum
from atoll.aggregation.server_steps import Direct, FedAdam, FedAvgM
from atoll.components.base import Aggregation, Component, Merge, Objective, Replace, ServerStep, Term
from atoll.core.config import describe, rebuild
from atoll.core.errors import UserError
from atoll.core.imports import import_attribute
from atoll.core.text import type_words
from atoll.methods import (
    calibre,
    dcco,
    euc,
    featarc,
    fedavg_ssl,
    fedbn,
    fedca,
    feddecorr,
    fedema,
    fedmar,
    fedopt,
    fedprox,
    fedquad,
    fedsc,
    fedu,
    fedu2,
    fedx,
    gossip,
    lagoon,
    ldawa,
    local_only,
    moon,
    orchestra,
    per_ssfl,
    scaffold,
    ssd,
    supervised,
)
from atoll.methods.fedu2 import EUA
from atoll.methods.ldawa import LDAWA, MDAWA
from atoll.methods.method import Method
from atoll.methods.names import check_known, check_tables, check_terms
from atoll.objectives.align_uniform import AlignUniform
from atoll.objectives.autoencoder import Autoencoder
from atoll.objectives.barlow_twins import BarlowTwins
from atoll.objectives.byol import BYOL
from atoll.objectives.cross_entropy import CrossEntropy
from atoll.objectives.dino import DINO
from atoll.objectives.mae import MAE
from atoll.objectives.metric_learning import Quadruplet, Triplet
from atoll.objectives.moco import MoCo
from atoll.objectives.rotation import Rotation, RotationTerm
from atoll.objectives.sigreg import SIGReg
from atoll.objectives.simclr import SimCLR
from atoll.objectives.simsiam import SimSiam
from atoll.objectives.supcon import SupCon
from atoll.objectives.swav import SwAV
from atoll.objectives.vicreg import VICReg

P = TypeVar("P", bound=Component)


def by_name(*components: type[P]) -> dict[str, type[P]]:
    """Map components by their names."""
    return {component.name: component for component in components}


OBJECTIVES: dict[str, type[Objective]] = by_name(
    AlignUniform,
    Autoencoder,
    BarlowTwins,
    BYOL,
    CrossEntropy,
    dcco.DCCO,
    DINO,
    fedca.DictionaryContrast,
    fedquad.FedQuad,
    fedsc.FedSC,
    MAE,
    fedmar.MAR,
    MoCo,
    orchestra.Orchestra,
    Quadruplet,
    Rotation,
    SIGReg,
    SimCLR,
    SimSiam,
    SupCon,
    SwAV,
    Triplet,
    VICReg,
)
TERMS: dict[str, type[Term]] = by_name(
    calibre.Prototypes,
    featarc.FeatureAlignment,
    fedca.Alignment,
    feddecorr.FedDecorr,
    fedprox.FedProx,
    fedu2.FUR,
    fedx.FedX,
    moon.MOON,
    per_ssfl.PerSSFL,
    RotationTerm,
    scaffold.Scaffold,
    ssd.DSR,
    ssd.HSD,
    ssd.PD,
)
MERGES: dict[str, type[Merge]] = by_name(
    euc.EUC,
    fedbn.FedBN,
    fedema.FedEMA,
    fedu.FedU,
    local_only.LocalOnly,
    per_ssfl.PersonalNetworks,
    Replace,
)
AGGREGATIONS: dict[str, type[Aggregation]] = by_name(
    calibre.PrototypeDivergence,
    EmInspector,
    EUA,
    featarc.FeatARC,
    FedAvg,
    gossip.Gossip,
    LDAWA,
    LossWeighted,
    MDAWA,
    Median,
    MultiKrum,
    PrivateFedAvg,
    lagoon.Relay,
    SecureSum,
    TrimmedMean,
)
SERVER_STEPS: dict[str, type[ServerStep]] = by_name(Direct, FedAdam, FedAvgM)

COMPONENTS: dict[str, type[Component]] = {**OBJECTIVES, **TERMS, **MERGES, **AGGREGATIONS, **SERVER_STEPS}

METHODS: dict[str, Method] = {
    "fed_align_uniform": fedavg_ssl.FED_ALIGN_UNIFORM,
    "fed_simclr": fedavg_ssl.FED_SIMCLR,
    "fed_barlow": fedavg_ssl.FED_BARLOW,
    "fed_vicreg": fedavg_ssl.FED_VICREG,
    "fed_byol": fedavg_ssl.FED_BYOL,
    "fed_simsiam": fedavg_ssl.FED_SIMSIAM,
    "fed_moco": fedavg_ssl.FED_MOCO,
    "fed_moco_v1": fedavg_ssl.FED_MOCO_V1,
    "fed_sigreg": fedavg_ssl.FED_SIGREG,
    "fed_dino": fedavg_ssl.FED_DINO,
    "fed_swav": fedavg_ssl.FED_SWAV,
    "fed_mae": fedavg_ssl.FED_MAE,
    "fed_pr": fedavg_ssl.FED_PR,
    "fed_ae": fedavg_ssl.FED_AE,
    "ssd": ssd.METHOD,
    "fedu": fedu.METHOD,
    "fedema": fedema.METHOD,
    "fedca": fedca.METHOD,
    "orchestra": orchestra.METHOD,
    "fedx": fedx.METHOD,
    "fedu2": fedu2.METHOD,
    "feddecorr": feddecorr.METHOD,
    "dcco": dcco.METHOD,
    "fedsc": fedsc.METHOD,
    "fed_mar": fedmar.FED_MAR,
    "calibre": calibre.METHOD,
    "lagoon": lagoon.METHOD,
    "fedprox": fedprox.METHOD,
    "scaffold": scaffold.METHOD,
    "fedbn": fedbn.METHOD,
    "per_ssfl": per_ssfl.METHOD,
    "featarc": featarc.METHOD,
    "featarc_align": featarc.ALIGN_ONLY,
    "featarc_cluster": featarc.CLUSTER_ONLY,
    "l_dawa": ldawa.L_DAWA,
    "l_dawa_fedavg": ldawa.L_DAWA_FEDAVG,
    "l_dawa_loss": ldawa.L_DAWA_LOSS,
    "l_dawa_fedu": ldawa.L_DAWA_FEDU,
    "m_dawa": ldawa.M_DAWA,
    "fed_loss": ldawa.FED_LOSS,
    "euc": euc.METHOD,
    "fedavgm": fedopt.FEDAVGM,
    "fedadam": fedopt.FEDADAM,
    "median": fedopt.MEDIAN,
    "trimmed_mean": fedopt.TRIMMED_MEAN,
    "multi_krum": fedopt.MULTI_KRUM,
    "local_only": local_only.METHOD,
    "peer_to_peer": gossip.METHOD,
    "dec_mar": fedmar.DEC_MAR,
    "fed_sl": supervised.FED_SL,
    "dec_sl": supervised.DEC_SL,
    "dec_slrep": supervised.DEC_SLREP,
    "supcon": supervised.SUPCON,
    "triplet": supervised.TRIPLET,
    "quadruplet": supervised.QUADRUPLET,
    "fedquad": fedquad.METHOD,
    "moon": moon.METHOD,
}


@dataclass(frozen=True)
class MethodOptions:
    """The recipe's ``[method]`` section: the name of a method, and components that replace the method's.

    Attributes:
        name: Name of a method (``atoll methods`` lists them), or ``module:attribute`` of your code.
        objective: Name of an objective or ``module:attribute``; by default the method's objective.
        terms: Names of the terms or ``module:attribute``, in order; ``[]`` for none; by default the method's terms.
        merge: Name of a merge or ``module:attribute``; by default the method's merge.
        aggregation: Name of an aggregation or ``module:attribute``; by default the method's aggregation.
        server: Name of a server step or ``module:attribute``; by default the method's server step.
        share: Patterns over the names of weights, such as ``"encoder.*"``, that clients share; each client retains
            its other weights and ends with a personal model. By default the method's; without any, all are shared.
    """

    name: str = "ssd"
    objective: str | None = None
    terms: tuple[str, ...] | None = None
    merge: str | None = None
    aggregation: str | None = None
    server: str | None = None
    share: tuple[str, ...] | None = None


def find(name: str, known: Mapping[str, Any], what: str) -> Any:
    """Look up a known name, or import the attribute of a user's module that ``module:attribute`` names."""
    check_known(name, known, what)
    return import_attribute(name, what) if ":" in name else known[name]


def _made(kind: type[P], name: str | None, what: str) -> P:
    """Construct a component with its defaults."""
    try:
        return kind()
    except TypeError as error:
        raise UserError(
            f"{what} {name!r} cannot be constructed without options ({error}); give each option a default"
        ) from None


def _check_name(component: Component, used: Collection[str]) -> None:
    """Refuse a blank name, and a name that would mix up the options, losses or state of two components."""
    taken = COMPONENTS.get(component.name, type(component)) is not type(component)
    if taken or not component.name.strip() or component.name in ("loss", *used):  # "loss" is the sum of all
        raise UserError(
            f"the name of the component {type(component).__qualname__} is {component.name!r}, which is blank or "
            'used by another component; give it a unique name, as in name: ClassVar[str] = "mine"'
        )


def make_method(chosen: MethodOptions, options: Mapping[str, Mapping[str, Any]]) -> Method:
    """Compose a method: take a named method, replace the components that the recipe names, and set their options.

    Args:
        chosen: The ``[method]`` section.
        options: The ``[options.NAME]`` tables, by component.

    Raises:
        UserError: A method, component or option is unknown, or the name of a component is not unique.
    """
    method = find(chosen.name, METHODS, "method")
    if isinstance(method, type) and issubclass(method, Objective):
        method = _made(method, chosen.name, "method")
    if isinstance(method, Objective):
        method = Method(objective=method, title=chosen.name)
    if not isinstance(method, Method):
        raise UserError(f"method {chosen.name!r} is {type_words(method)}, not an atoll Method or Objective")
    used: set[str] = set()

    def component(name: str | None, default: Any, known: Mapping[str, Any], kind: type[Component]) -> Any:
        what, made = "server step" if kind is ServerStep else kind.__name__.lower(), default
        if name is not None and (default is None or name != default.name):
            made = find(name, known, what)
        if isinstance(made, type) and issubclass(made, Component):
            made = _made(made, name, what)
        if not isinstance(made, kind):
            raise UserError(
                f"{what} {name or chosen.name!r} is {type_words(made)}, not an atoll {kind.__name__}"
            )
        _check_name(made, used)
        used.add(made.name)
        return rebuild(made, options.get(made.name, {}), f"options.{made.name}")

    own_terms = {term.name: term for term in method.terms}
    names = list(own_terms) if chosen.terms is None else list(chosen.terms)
    check_terms(names)
    composed = dataclasses.replace(
        method,
        objective=component(chosen.objective, method.objective, OBJECTIVES, Objective),
        terms=tuple(component(name, own_terms.get(name), TERMS, Term) for name in names),
        merge=component(chosen.merge, method.merge, MERGES, Merge),
        aggregation=component(chosen.aggregation, method.aggregation, AGGREGATIONS, Aggregation),
        server=component(chosen.server, method.server, SERVER_STEPS, ServerStep),
        share=method.share if chosen.share is None else chosen.share,
    )
    check_tables(options, used)
    return dataclasses.replace(composed, title=_title(method, composed, chosen.name))


def _title(method: Method, composed: Method, name: str) -> str:
    """Title of a composed method, with the components that replace the method's."""
    alone = composed.merge.alone and not method.merge.alone
    words = []
    for axis in ("objective", *(() if alone else ("merge",)), "aggregation", "server"):
        if getattr(composed, axis).name != getattr(method, axis).name:
            words.append(f"{axis} {getattr(composed, axis).name}")
    if [term.name for term in composed.terms] != [term.name for term in method.terms]:
        terms = " + ".join(term.name for term in composed.terms)
        words.append(f"terms {terms}" if terms else "no terms")
    changes = (f" with {', '.join(words)}" if words else "") + (", each client alone" if alone else "")
    return (method.title or name) + changes if changes else method.title


def complete(chosen: MethodOptions, method: Method) -> tuple[MethodOptions, dict[str, dict[str, Any]]]:
    """Write out all defaults of a ``[method]`` section and its options, as in a run's ``recipe.toml``."""
    filled = MethodOptions(
        name=chosen.name,
        objective=chosen.objective or method.objective.name,
        terms=chosen.terms if chosen.terms is not None else tuple(term.name for term in method.terms),
        merge=chosen.merge or method.merge.name,
        aggregation=chosen.aggregation or method.aggregation.name,
        server=chosen.server or method.server.name,
        share=method.share,
    )
    components = (method.objective, *method.terms, method.merge, method.aggregation, method.server)
    return filled, {component.name: table for component in components if (table := describe(component))}
