"""The components of a method, and the order in which the engine calls their hooks.

A method composes an objective, terms, a merge, an aggregation and a server step (see `atoll.methods`). Each is a
`Component`: a frozen dataclass with the recipe's options as fields. Components are independent of the engine that
runs them, and every hook has a default that does nothing. A run calls the hooks in this order:

    prerequisites(), constants(), init(), models()             once, at the server
    for each round:
        cohort()                                               the clients that take part
        for each client of the cohort:
            epochs(), sent(), send()                           at the server: the message
            choose() → join() → after_heads() → start()        at the client: the initial weights of the training
            for each batch:
                inputs() → forwards() → loss()                 images, passes, the loss; then an optimiser step
                after_step()
            finish() → report() → keep()                       the update, and the client state
            reference() → declares() → refuse_slice()          at the server: the update is checked
            open().add(), fold().add()                         and folded
        open().close(), fold().close() → step()                the next state
    deploy(), personal()                                       the resulting models

To write a component, import from this module only.
"""

from __future__ import annotations

from atoll.components.axes import Aggregation, Merge, Objective, Replace, ServerStep, Term
from atoll.components.component import Component
from atoll.components.context import ClientContext, Scope
from atoll.components.declaration import (
    ChoiceSpec,
    NumberSpec,
    Optional,
    PerWeight,
    Spec,
    TensorSpec,
    UpTo,
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
    "UpTo",
    "Update",
    "UpdateGeometry",
    "init_seed",
    "run_forwards",
    "seeded",
]
