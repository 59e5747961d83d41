"""Tensors of networks that train one client after the other: read, loaded and reset between clients."""

from __future__ import annotations

from torch import Tensor, nn

from atoll.core.tree import Weights, clone
from atoll.models.unsaved_buffers import set_unsaved, unsaved_buffers


class NetworkState:
    """State dict of networks, in half its time, and the buffers that are not in it.

    Args:
        networks: The networks, as each client's round begins with them except for their weights.
    """

    def __init__(self, networks: nn.ModuleDict) -> None:
        self._networks = networks
        self._places = _places(networks)
        self._unsaved = clone(unsaved_buffers(networks))

    def weights(self) -> Weights:
        """Return the state dict; its tensors share memory with the networks.

        Each tensor is looked up again, because a module may have replaced a buffer by another tensor.
        """
        if self._places is None:
            return {name: value.detach() for name, value in self._networks.state_dict().items()}
        return {name: getattr(module, own).detach() for name, (module, own) in self._places.items()}

    def load(self, weights: Weights, whole: bool = False) -> None:
        """Copy weights into the networks, as `nn.Module.load_state_dict` does in several times the time."""
        own = self.weights()
        known = own.keys() == weights.keys() if whole else own.keys() >= weights.keys()
        if (
            not known
            or self._places is None
            or any(own[name].shape != weight.shape for name, weight in weights.items())
        ):
            self._networks.load_state_dict(weights, strict=whole)  # says what differs
            return
        for name, weight in weights.items():
            own[name].copy_(weight)

    def reset(self) -> None:
        """Give the buffers that are not in the state dict their initial values."""
        if self._unsaved:
            set_unsaved(self._networks, self._unsaved)


def _places(networks: nn.Module) -> dict[str, tuple[nn.Module, str]] | None:
    """The module and the attribute of each tensor of the state dict; None if one has other names there."""
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
