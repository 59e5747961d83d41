"""Base class of encoders: a module from images to representations that records how to rebuild it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from atoll.core.errors import UserError
from atoll.core.text import few, first_line, short
from atoll.models.norms import evaluating

MOST = 65_536  # channels of an image, or pixels of a side


class Encoder(nn.Module):
    """Module that maps images to representations h.

    Attributes:
        dim: Width of a representation.
        spec: Arguments of `build_encoder` as JSON values, from which the same architecture can be rebuilt.
        metadata: JSON values saved with the weights, such as the normalisation of the inputs.

    Shape:
        - Input: (N, channels, image_size, image_size)
        - Output: (N, dim)
    """

    dim: int
    spec: dict[str, Any]
    metadata: dict[str, Any]

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.spec = {}
        self.metadata = {}

    def forward(self, images: Tensor) -> Tensor:
        """Compute the representations of a batch of images; subclasses implement this."""
        raise NotImplementedError

    def library_state(self) -> dict[str, Tensor]:
        """Return the weights under the names of the library that the encoder comes from."""
        return self.state_dict()

    def load_library_state(self, state: dict[str, Tensor]) -> None:
        """Load weights under the names of `library_state`."""
        self.load_state_dict(state)


def input_metadata(encoder: Encoder) -> dict[str, Any]:
    """Metadata of an encoder that describe its input images.

    Raises:
        UserError: The metadata lack ``image_size``, ``channels``, ``mean`` or ``std``, or one has another type.

    Example:
        >>> from atoll.models import ModelOptions, build_encoder
        >>> from atoll.models.encoder import input_metadata
        >>> encoder = build_encoder(ModelOptions(encoder="resnet-narrow"), channels=1, image_size=8)
        >>> encoder.metadata = {"image_size": 8, "channels": 1, "mean": [0.5], "std": [0.5]}
        >>> input_metadata(encoder)["mean"]
        [0.5]
    """
    about = encoder.metadata
    again = (
        "save it with them: "
        "save_encoder(path, encoder, {'image_size': …, 'channels': …, 'mean': […], 'std': […]})"
    )
    if missing := [key for key in _DESCRIBED if key not in about]:
        raise UserError(f"the encoder's file does not say the {', '.join(missing)} of its images; {again}")
    for key, possible in _DESCRIBED.items():
        if not possible(about[key]):
            raise UserError(
                f"the encoder's file says {short(about[key])} for the {key} of its images; {again}"
            )
    return about


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MOST


def _are_numbers(values: object) -> bool:
    return isinstance(values, list | tuple) and all(isinstance(value, int | float) for value in values)


_DESCRIBED = {"image_size": _is_size, "channels": _is_size, "mean": _are_numbers, "std": _are_numbers}


@torch.no_grad()
def represent_black(encoder: nn.Module, shape: tuple[int, int, int]) -> Tensor:
    """Representation of one black image (C, H, W), in eval mode; each module's mode is restored."""
    with evaluating(encoder), torch.random.fork_rng(devices=[]):
        output: Tensor = encoder(torch.zeros(1, *shape))
    return output


def refuse_crops(encoder: Encoder, channels: int, size: int) -> None:
    """Refuse local crops of a size that an encoder cannot process.

    Raises:
        UserError: The encoder cannot process them.
    """
    try:
        represent_black(encoder, (channels, size, size))
    except Exception as error:  # a foreign network may raise any exception
        raise UserError(
            f"the encoder cannot process local crops of side {size} ({first_line(error)}); set views.local_size to "
            "the size of the views, or choose an encoder for images of any size"
        ) from error


def graft(module: nn.Module, state: dict[str, Tensor], source: str) -> str:
    """Copy into ``module`` the tensors of ``state`` that match by name and shape, and report the rest.

    Args:
        module: The module to initialise, in place.
        state: Named tensors, such as a torchvision state dict.
        source: Name of ``state`` in the returned sentence.

    Returns:
        One sentence: how many of the module's tensors were copied, which were not, and which of ``state`` were
        not used.

    Raises:
        UserError: No trained tensor matches.
    """
    target = module.state_dict()
    matching = {name for name in target.keys() & state.keys() if target[name].shape == state[name].shape}
    # Of trained tensors only: BatchNorm's counters match any module.
    if matching.isdisjoint(name for name, _ in module.named_parameters()):
        raise UserError(
            f"{source} holds no trained tensor that matches this encoder by name and shape "
            f"(it has {few(sorted(state), 4)}; the encoder has {few(sorted(target), 4)}); "
            "give weights of the same architecture"
        )
    with torch.no_grad():
        for name in matching:
            target[name].copy_(state[name])
    sentence = f"{len(matching)} of the encoder's {len(target)} tensors came from {source}"
    if unchanged := target.keys() - matching:
        sentence += f"; missing there or of another shape, so left unchanged: {few(sorted(unchanged), 4)}"
    if unused := state.keys() - target.keys():
        sentence += f"; there but not used: {few(sorted(unused), 4)}"
    return sentence + "."
