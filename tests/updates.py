"""An update that passes the update checks, changes of it, and the checks themselves."""

from dataclasses import replace

import torch

from atoll.aggregation.fedavg import FedAvg
from atoll.engines.update_checks import UpdateChecks
from atoll.methods.euc import EUC
from atoll.methods.method import Method
from atoll.objectives.simclr import SimCLR
from tests.folds import model, setting

METHOD = Method(objective=SimCLR(), merge=EUC(), aggregation=FedAvg())
MODEL = model(0)
A_LOSS = "not a float from -1e+06 to 1e+06 (of the first round)"
DIVERGED = "training diverged; lower train.lr"
LOSSES = {"loss": 1.0, "simclr": 1.0}


def update(**changes):
    """A good update, with changes laid over it."""
    weights = {n: t + 0.1 if t.is_floating_point() else t + 1 for n, t in MODEL.items()}
    return {"weights": weights, "samples": 10, "losses": LOSSES, "parts": {}, **changes}


def with_weights(**changes):
    """The same, with tensors replaced."""
    good = update()
    return {**good, "weights": {**good["weights"], **changes}}


def spoiled(value):
    tensor = MODEL["conv.weight"].clone()
    tensor[2, 1, 1, 1] = value
    return with_weights(**{"conv.weight": tensor})


def without(name):
    good = update()
    return {**good, "weights": {n: t for n, t in good["weights"].items() if n != name}}


def checks(**train):
    return UpdateChecks(METHOD, setting(**train), frozenset(MODEL))


def asked(client=0, epochs=2):
    """What a client was asked; of four clients with 10, 11, 12 and 25 images in batches of 4."""
    return {"client": client, "epochs": epochs, "round": 1, "kept": 0, "models": {}, "parts": {}}


STATISTICS = frozenset({"bn.running_mean", "bn.running_var", "bn.num_batches_tracked"})
COUNTER = MODEL["bn.num_batches_tracked"]


def known(aggregation=METHOD.aggregation, objective=METHOD.objective, **train):
    """Checks at a server that knows the clients' sizes."""
    sizes = (10, 11, 12, 25)
    known = replace(setting(batch_size=4, **train), sizes=sizes, running_statistics=STATISTICS)
    method = Method(objective=objective, aggregation=aggregation)
    return UpdateChecks(method, known, frozenset(MODEL))


def healthy(**changes):
    """A good update with statistics that can be: variances above 0."""
    return with_weights(**{"bn.running_var": torch.ones(3), "bn.num_batches_tracked": COUNTER + 3, **changes})
