"""Names of the networks' weights: those that are exchanged, those in an update, and those that stay at a client."""

from __future__ import annotations

from torch import nn

from atoll.components.training import TrainOptions
from atoll.methods.method import Method
from atoll.models.adapters import matching
from atoll.models.norms import norm_layers


def update_names(method: Method, train: TrainOptions, networks: nn.ModuleDict) -> set[str]:
    """Names of the weights in an update: all exchanged ones that merge and ``bn_buffers`` do not keep local."""
    local_only = method.merge.private(networks)
    if train.bn_buffers != "average":
        local_only = local_only | buffer_names(networks)
    return travelling_names(method, networks) - local_only


def travelling_names(method: Method, networks: nn.ModuleDict) -> set[str]:
    """Names of the weights that server and clients exchange: not frozen, shared by merge and ``method.share``."""
    state = networks.state_dict(keep_vars=True)
    local = {name for name in state if name.partition(".")[0] in method.merge.local_heads}
    names = state.keys() - frozen_names(networks) - local
    if method.share is None:
        return names
    shared = matching(state, method.share, "method.share")
    held = {id(state[name]) for name in shared}  # two layers may hold one weight, under two names
    return names & {name for name, weight in state.items() if id(weight) in held}


def personal_names(method: Method, networks: nn.ModuleDict) -> set[str]:
    """Names of the weights that each client trains for itself, by its merge or ``method.share``."""
    return networks.state_dict().keys() - frozen_names(networks) - travelling_names(method, networks)


def frozen_names(networks: nn.Module) -> set[str]:
    """Names of the weights that do not train, of the buffers of modules that do not train, and of other tensors.

    The other tensors are those of whole numbers outside BatchNorm. The server cannot average an index table or a
    step counter, and knows no bound for the values that a client may send.
    """
    counters = buffer_names(networks)
    frozen = {
        name
        for name, tensor in networks.state_dict().items()
        if not (tensor.is_floating_point() or tensor.is_complex() or name in counters)
    }
    for prefix, module in networks.named_modules(remove_duplicate=False):
        own = dict(module.named_parameters(recurse=False))
        names = [name for name in module.state_dict() if "." not in name]
        still = {name for name, weight in own.items() if not weight.requires_grad}
        if own and len(still) == len(own):
            still = set(names)
        frozen |= {f"{prefix}.{name}" if prefix else name for name in still}
    return frozen


def buffer_names(networks: nn.Module) -> set[str]:
    """Names of BatchNorm's running statistics, identified by module type."""
    return {
        f"{prefix}.{name}"
        for prefix, norm in norm_layers(networks, every_name=True).items()
        for name, _ in norm.named_buffers(recurse=False)
    }
