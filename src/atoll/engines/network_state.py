"""Tensors of networks that are trained for one client after another."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from atoll.core.errors import warn
from atoll.core.tree import Weights, clone


class NetworkState:
    """State dict of networks, built in half the time, and a check of buffers that are not in it.

    Args:
        networks: The networks.
    """

    def __init__(self, networks: nn.ModuleDict) -> None:
        self._networks = networks
        self._places = _places(networks)
        self._unsaved: Weights | None = None  # after the first client
        self._noticed = False

    def weights(self) -> Weights:
        """Return the state dict; its tensors share memory with the networks.

        Each tensor is looked up again, because a module may have replaced a buffer.
        """
        if self._places is None:
            return {name: value.detach() for name, value in self._networks.state_dict().items()}
        return {name: getattr(module, own).detach() for name, (module, own) in self._places.items()}

    def load(self, weights: Weights, whole: bool = False) -> None:
        """Copy weights into the networks like `nn.Module.load_state_dict`, but several times as fast."""
        own = self.weights()
        known = own.keys() == weights.keys() if whole else own.keys() >= weights.keys()
        if (
            not known
            or self._places is None
            or any(own[name].shape != weight.shape for name, weight in weights.items())
        ):
            self._networks.load_state_dict(weights, strict=whole)  # the error names the differences
            return
        for name, weight in weights.items():
            own[name].copy_(weight)

    def notice_unsaved(self) -> None:
        """Warn of buffers that are not in the state dict and change from one client to the next.

        Buffers that do not change are caches or constants. Resetting a buffer would be no remedy, because a module
        may keep information about a cache elsewhere.
        """
        if self._noticed:
            return
        before, self._unsaved = self._unsaved, clone(_unsaved_buffers(self._networks))
        if before is None:
            return
        self._noticed, after, self._unsaved = True, self._unsaved, None
        for name in sorted(before.keys() & after.keys()):
            if _differ(before[name], after[name]):
                warn(
                    f"the buffer {name} has persistent=False and changes as clients train: it passes from one "
                    "client to the next, so that the weights depend on the number of workers; register it as "
                    "persistent"
                )


def _unsaved_buffers(networks: nn.Module) -> Weights:
    """The buffers that are not in the state dict, unless they share memory with a tensor that is in it."""
    saved = {tensor.data_ptr() for tensor in networks.state_dict().values()}
    return {
        f"{prefix}.{name}": buffer
        for prefix, module in networks.named_modules()
        for name in module._non_persistent_buffers_set
        if (buffer := module._buffers.get(name)) is not None
        and buffer.layout == torch.strided
        and buffer.data_ptr() not in saved
    }


def _differ(before: Tensor, after: Tensor) -> bool:
    """Whether two values of a buffer differ; values of different shapes count as a cache."""
    if before.shape != after.shape:
        return False
    nan = (before != before) & (after != after)
    return bool(((before != after) & ~nan).any())


def _places(networks: nn.Module) -> dict[str, tuple[nn.Module, str]] | None:
    """The module and attribute of each tensor of the state dict; None if one is not stored under its name."""
    modules = dict(networks.named_modules(remove_duplicate=False))
    places = {}
    for name, tensor in networks.state_dict().items():
        path, _, own = name.rpartition(".")
        place = (modules.get(path, networks), own)
        found = getattr(*place, None)
        if not isinstance(found, Tensor) or found.data_ptr() != tensor.data_ptr():
            return None
        places[name] = place
    return places
