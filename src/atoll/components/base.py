"""What a method is made of: components, and the order in which the engine calls their hooks.

A method composes an objective, terms, a merge, an aggregation and a server step (see `atoll.methods`). Each is a
`Component`: a frozen dataclass whose fields are its options in a recipe. Components never know which engine runs
them, and every hook has a default that does nothing. A run, hook by hook:

    prerequisites(), constants(), init(), models()             once, at the server
    for each round:
        cohort()                                               which clients take part
        for each client of the cohort:
            epochs(), sent(), send()                           at the server: the message
            choose() → join() → start()                        at the client: the weights that training starts from
            for each batch:
                inputs() → forwards() → loss()                 images, passes, the loss; then the optimiser's step
                after_step()
            finish() → report() → keep()                       the update, and what stays at the client
            reference() → declares() → refuse_slice()          at the server: the update is checked
            open().add(), fold().add()                         and folded
        open().close(), fold().close() → step()                the next state
    deploy(), personal()                                       the models that result

This module is the one import for whoever writes a component.
"""

from __future__ import annotations

from atoll.components.axes import Aggregation, Merge, Objective, Replace, ServerStep, Term
from atoll.components.component import Component
from atoll.components.context import ClientContext, Scope
from atoll.components.declaration import (
    AtMost,
    ChoiceSpec,
    NumberSpec,
    Optional,
    PerWeight,
    Spec,
    TensorSpec,
)
from atoll.components.folds import Fold, SliceFold
from atoll.components.forwards import VIEWS, Features, Forward, Passes, run_forwards
from atoll.components.messages import (
    ClientState,
    Deployment,
    Message,
    Models,
    ServerState,
    Update,
    UpdateGeometry,
)
from atoll.components.prerequisites import Prerequisite, Trained
from atoll.components.setting import Setting, init_seed, seeded
from atoll.data.batch import Batch, ClientData

__all__ = [
    "VIEWS",
    "Aggregation",
    "AtMost",
    "Batch",
    "ChoiceSpec",
    "ClientContext",
    "ClientData",
    "ClientState",
    "Component",
    "Deployment",
    "Features",
    "Fold",
    "Forward",
    "Merge",
    "Message",
    "Models",
    "NumberSpec",
    "Objective",
    "Optional",
    "Passes",
    "PerWeight",
    "Prerequisite",
    "Replace",
    "Scope",
    "ServerState",
    "ServerStep",
    "Setting",
    "SliceFold",
    "Spec",
    "TensorSpec",
    "Term",
    "Trained",
    "Update",
    "UpdateGeometry",
    "init_seed",
    "run_forwards",
    "seeded",
]
