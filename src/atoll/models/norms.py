"""Weights and BatchNorm layers of networks by name, and modes of networks with some frozen layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def named_weights(networks: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by all their names in the state; a parameter of two layers has two names.

    Example:
        >>> from torch import nn
        >>> from atoll.models.norms import named_weights
        >>> layer = nn.Linear(3, 3)
        >>> list(named_weights(nn.Sequential(layer, layer)))
        ['0.weight', '0.bias', '1.weight', '1.bias']
    """
    return dict(networks.named_parameters(remove_duplicate=False))


def norm_layers(networks: nn.Module, every_name: bool = False) -> dict[str, _BatchNorm]:
    """Find all BatchNorm layers by their type, because names differ between libraries.

    A layer with two names is returned under the first, or with ``every_name`` under both.

    Example:
        >>> from torch import nn
        >>> from atoll.models.norms import norm_layers
        >>> list(norm_layers(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))))
        ['1']
    """
    modules = networks.named_modules(remove_duplicate=not every_name)
    return {name: module for name, module in modules if isinstance(module, _BatchNorm)}


def train_mode(networks: nn.Module) -> None:
    """Set train mode; BatchNorm layers whose weights are all frozen stay in eval, so that they do not change.

    Example:
        >>> from torch import nn
        >>> from atoll.models.norms import train_mode
        >>> networks = nn.ModuleList([nn.BatchNorm1d(3), nn.BatchNorm1d(3).requires_grad_(False)])
        >>> train_mode(networks)
        >>> [norm.training for norm in networks]
        [True, False]
    """
    networks.train()
    for norm in norm_layers(networks).values():
        weights = list(norm.parameters(recurse=False))
        if weights and not any(weight.requires_grad for weight in weights):
            norm.eval()


def modes(networks: nn.Module) -> list[bool]:
    """Return whether each module is in train mode, in the order of `torch.nn.Module.modules`.

    Example:
        >>> from torch import nn
        >>> from atoll.models.norms import modes
        >>> modes(nn.Sequential(nn.ReLU(), nn.ReLU().eval()))
        [True, True, False]
    """
    return [module.training for module in networks.modules()]


def set_modes(networks: nn.Module, training: list[bool]) -> None:
    """Set the modes that `modes` returned for these networks or for networks of which they are a copy.

    Example:
        >>> from torch import nn
        >>> from atoll.models.norms import modes, set_modes
        >>> networks = nn.Sequential(nn.ReLU(), nn.ReLU().eval())
        >>> before = modes(networks)
        >>> set_modes(networks.eval(), before)
        >>> modes(networks)
        [True, True, False]
    """
    for module, mode in zip(networks.modules(), training, strict=True):
        module.training = mode


@contextmanager
def evaluating(networks: nn.Module) -> Iterator[None]:
    """Set eval mode inside the block, and restore the mode of every module afterwards.

    Example:
        >>> from torch import nn
        >>> from atoll.models.norms import evaluating, modes
        >>> networks = nn.Sequential(nn.ReLU(), nn.ReLU().eval())
        >>> with evaluating(networks):
        ...     modes(networks)
        [False, False, False]
        >>> modes(networks)
        [True, True, False]
    """
    before = modes(networks)
    networks.eval()
    try:
        yield
    finally:
        set_modes(networks, before)
