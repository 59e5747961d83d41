"""Encoders that Atoll does not build itself: timm's, Hugging Face's, and modules of the user's own code.

All are modules that map images to representations. Their weights keep their library's names, with the prefix
``model.``, so that the library can load an export.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from atoll.core.environment import CODE, PYTHON
from atoll.core.errors import UserError
from atoll.core.files import hash_bytes
from atoll.core.given import PREFIX, Given, not_given
from atoll.core.imports import import_attribute
from atoll.core.process_state import equal_streams, random_streams, seeded_streams, streams_kept
from atoll.core.text import first_line, plural, type_words
from atoll.models.encoder import Encoder, represent_black
from atoll.models.fingerprint import code_of, first_code_of
from atoll.models.libraries import (
    HUGGING_FACE,
    TIMM,
    InputConfig,
    MissingEncoderError,
    configured_input,
    hugging_face_input,
    hugging_face_model,
    timm_input,
    timm_model,
)
from atoll.models.norms import evaluating

Factory = Callable[..., nn.Module]
_DIGITS = 12
_DRAWS = 20  # passes that are compared where random numbers are drawn: one mask of few patches often equals another


class ExternalEncoder(Encoder):
    """A network of another library, or of the user's, as an encoder.

    Args:
        model: A module that returns (N, d) for images, or Hugging Face's output with ``last_hidden_state``.
        name: The encoder's name in a recipe, for messages.
        shape: (C, H, W) of its input.

    Raises:
        UserError: It does not accept such images, or returns something else.
    """

    def __init__(self, model: nn.Module, name: str, shape: tuple[int, int, int]) -> None:
        super().__init__(dim=0)
        self.model = model
        self._name = name
        self.dim = self._measure(shape)
        _check_state(model, name)

    def forward(self, images: Tensor) -> Tensor:
        """Compute the representations of a batch of images.

        Raises:
            UserError: The module returns something else, such as a second output in train mode.
        """
        output: Any = self.model(images)
        h: Any = output if isinstance(output, Tensor) else _pooled(self.model, output)
        if (
            isinstance(h, Tensor)
            and h.ndim == 2
            and h.is_floating_point()
            and 0 < h.shape[1] == (self.dim or h.shape[1])
        ):
            return h
        kind = str(h.dtype).removeprefix("torch.") if isinstance(h, Tensor) else ""
        found = f"a {kind} tensor of shape {tuple(h.shape)}" if kind else type_words(h)
        raise UserError(
            f"model.encoder = {self._name!r} returns {found} for {len(images)} image{'s' * (len(images) != 1)} in "
            f"{'train' if self.training else 'eval'} mode, and must return a row of floats for each, of shape "
            f"(N, {self.dim or 'd'}); pool its output, or wrap it in a module that does"
        )

    def library_state(self) -> dict[str, Tensor]:
        """Return the weights under the names of the network's library."""
        return self.model.state_dict()

    def load_library_state(self, state: dict[str, Tensor]) -> None:
        """Load weights under the names of the network's library."""
        self.model.load_state_dict(state)

    def _measure(self, shape: tuple[int, int, int]) -> int:
        try:
            h = represent_black(self.cpu(), shape)  # the user's module may be on a GPU
            wrong = self._why_not_fixed(shape)
        except UserError:
            raise
        except Exception as error:  # a foreign network may raise any exception
            kinds = {w.dtype for w in self.parameters() if w.is_floating_point()} - {torch.float32}
            if kinds:
                raise UserError(
                    f"model.encoder = {self._name!r} has weights of {str(kinds.pop()).removeprefix('torch.')}, and "
                    "must have float32; convert it with .float()"
                ) from error
            raise UserError(
                f"model.encoder = {self._name!r} cannot process images of shape {shape} (channels, height, width): "
                f"{first_line(error)}; change data.channels, data.image_size or the encoder"
            ) from error
        # The heads' dtype. Autocast is off here; in training it may be on.
        if len(h) != 1 or h.dtype != torch.get_default_dtype():
            found = f"{plural(len(h), 'row')} of {str(h.dtype).removeprefix('torch.')}"
            raise UserError(
                f"model.encoder = {self._name!r} returns {found} for one image, and must return one row of "
                "float32; convert its weights and its output with .float()"
            )
        if wrong:
            raise UserError(f"model.encoder = {self._name!r} {wrong}")
        return h.shape[1]

    @torch.inference_mode(False)  # whose tensors do not count changes in place
    @torch.no_grad()
    def _why_not_fixed(self, shape: tuple[int, int, int]) -> str:
        """Reason why an image has no fixed representation in eval mode; empty if it has one."""
        image = torch.linspace(0, 1, math.prod(shape)).view(1, *shape)
        given, other = image.clone(), 1 - image
        with evaluating(self), streams_kept():
            streams = random_streams()
            version, first = given._version, self(given)
            if given._version > version:  # equal values say little: a ReLU in place keeps those above 0
                return "changes the images that it is given; let it compute on a copy"
            passes = 1 if equal_streams(streams, random_streams()) else _DRAWS
            repeats = [self(image.clone()) for _ in range(passes)]
            beside = self(torch.cat([image, other]))[:1]
        if not all(torch.allclose(first, again, equal_nan=True) for again in repeats):
            return (
                "draws random numbers in eval mode, so that an image has no fixed representation; let it drop or "
                "mask only while self.training (for hf:vit_mae, which always masks, set model.encoder to hf:vit "
                "and model.weights to its weights)"
            )
        if not torch.allclose(first, beside, rtol=1e-2, atol=1e-3, equal_nan=True):
            return (
                "represents an image otherwise beside another one in eval mode, so that an image has no fixed "
                "representation; let its BatchNorm track running statistics, and nothing else depend on the batch"
            )
        return ""


def _check_state(model: nn.Module, name: str) -> None:
    """Refuse a state that cannot be averaged: values that are not tensors, and complex numbers."""
    for key, value in model.state_dict().items():
        if not isinstance(value, Tensor) or value.is_complex():
            kind = "complex numbers" if isinstance(value, Tensor) else "no tensor"
            raise UserError(
                f"model.encoder = {name!r}: {key!r} of its state is {kind}, which cannot be averaged nor stored; "
                "use real tensors (torch.view_as_real), and no get_extra_state"
            )


def is_external(name: str) -> bool:
    """Whether an encoder's name refers to another library or to the user's code."""
    return ":" in name


def is_own_code(name: str) -> bool:
    """Whether an encoder's name is ``module:attribute``, so that building it imports a user's module."""
    return is_external(name) and not name.startswith((TIMM, HUGGING_FACE, PREFIX))


def build_external(name: str, channels: int, size: int, config: Mapping[str, Any] | None = None) -> Encoder:
    """Build an encoder that `is_external`.

    Args:
        name: ``timm:NAME``, ``hf:NAME``, ``module:attribute``, or a `Given` module or factory.
        channels: Channels of the images.
        size: Side of the images in pixels.
        config: Hugging Face's configuration, if known; by default the configuration that the name has.

    Raises:
        MissingEncoderError: The library is not installed, or the object is not here.
        UserError: There is no such encoder, or it does not fit the images.
    """
    about: dict[str, Any] = {}
    if name.startswith(TIMM):
        model = timm_model(name, channels, size)
    elif name.startswith(HUGGING_FACE):
        model, about = hugging_face_model(name, channels, size, config)
    else:
        model = make_module(_own(name), name, channels, size)
        about = {"code": {"python": PYTHON, f"{CODE}{name}": hash_bytes(first_code_of(model).encode())}}
    encoder = ExternalEncoder(model, name, (channels, size, size))
    encoder.spec = {"encoder": str(name), "channels": channels, "image_size": size, **about}
    return encoder


def input_config(name: str, channels: int, size: int | None) -> InputConfig:
    """Read the input that an external encoder's own configuration describes.

    Args:
        name: As for `build_external`.
        channels: Channels of the images; for one channel, mean and std are averaged over the network's channels.
        size: Side of the images, if the recipe gives it.
    """
    if name.startswith(TIMM):
        found = timm_input(name)
    elif name.startswith(HUGGING_FACE):
        found = hugging_face_input(name)
    else:
        found = _own_input(_own(name), name, channels, size)
    return found.for_channels(channels)


def make_module(source: nn.Module | Factory, name: str, channels: int, size: int | None) -> nn.Module:
    """Copy a module, or call a factory; it receives ``channels`` and ``image_size`` if its signature names them."""
    if isinstance(source, nn.Module):
        _check_parts(source, name)
        try:
            copied = copy.deepcopy(source)
            if not all(parameter.is_leaf for parameter in copied.parameters()):  # TorchScript's
                raise TypeError("copies of its parameters cannot be trained")
            return copied
        except Exception as error:  # such as lazy layers without weights, or tensors computed by hooks
            raise UserError(
                f"model.encoder = {name!r} cannot be copied: {first_line(error)}; give a function or class that "
                "makes the module"
            ) from error
    offered = {"channels": channels, "image_size": size}
    names = _parameters(source)
    try:
        made = source(**{key: value for key, value in offered.items() if key in names})
    except Exception as error:  # the user's code may raise any exception
        raise UserError(
            f"model.encoder = {name!r} cannot be built: {type(error).__name__}: {first_line(error)}"
        ) from error
    if not isinstance(made, nn.Module):
        raise UserError(
            f"model.encoder = {name!r} returns {type_words(made)}; it must be a class or function that "
            "returns a torch.nn.Module"
        )
    _check_parts(made, name)
    return made


def _check_parts(model: nn.Module, name: str) -> None:
    """Refuse a module whose class does not call ``nn.Module``'s ``__init__``: PyTorch cannot use it."""
    for part in model.modules():
        if not hasattr(part, "_modules"):
            raise UserError(
                f"model.encoder = {name!r}: {type(part).__qualname__} is no module yet; call super().__init__() at "
                "the start of its __init__"
            )


def give_encoder(source: Any, channels: int, size: int) -> Given:
    """Name an encoder that Python code gives, with a fingerprint of its weights, structure and code.

    Args:
        source: A module, or a function or class that returns one. A factory is called under a fixed seed.
        channels: Channels of the images.
        size: Side of the images in pixels.

    Raises:
        UserError: It is neither.
    """
    name = call_it(source)
    with seeded_streams(0):
        model = make_module(source, name, channels, size)
    digest = hashlib.sha256(f"{model!r}{code_of(model, source)}".encode())
    for key, tensor in sorted(model.state_dict().items()):
        if not isinstance(tensor, Tensor) or is_lazy(tensor):
            continue  # refused when the encoder is built; drawn from the run's seed
        plain = tensor.detach().cpu().contiguous()
        digest.update(f"{key} {plain.dtype} {tuple(plain.shape)}".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return Given.named(name, digest.hexdigest()[:_DIGITS], source)


def call_it(source: Any) -> str:
    """The name that the author gave to a module's class or to a factory.

    Raises:
        UserError: It is neither a module nor callable.
    """
    if isinstance(source, nn.Module):
        return type(source).__qualname__
    if not callable(source):
        expected = "a torch.nn.Module, or a function or class that makes one"
        raise not_given("encoder", source, "model.encoder", expected)
    return str(getattr(source, "__qualname__", type(source).__qualname__))


def _own(name: str) -> Any:
    """The user's module or factory that a name refers to."""
    if isinstance(name, Given):
        return name.value
    if name.startswith(PREFIX):
        raise MissingEncoderError(
            f"the encoder {name!r} was given to its run as an object, which a file does not hold; pass it again as "
            "encoder=… (to load_encoder, or to simulate with resume=True, which returns a run with it), or name it "
            "in the recipe as module:attribute"
        )
    try:
        return import_attribute(name, "model.encoder")
    except UserError as error:
        raise MissingEncoderError(str(error)) from error


def _own_input(source: Any, name: str, channels: int, size: int | None) -> InputConfig:
    """Read the configuration of a module or factory, or of the module that the factory makes."""
    found = configured_input(source)
    if (
        found is None
        and not isinstance(source, nn.Module)
        and (size or "image_size" not in _parameters(source))
    ):
        with streams_kept():
            found = configured_input(make_module(source, name, channels, size))
    return found or InputConfig()


def _parameters(source: Any) -> set[str]:
    try:
        return set(inspect.signature(source).parameters)
    except (TypeError, ValueError):  # a built-in callable
        return set()


def _pooled(model: nn.Module, output: Any) -> Tensor:
    """One row for each image: the class token, the network's own pooled output, or the mean over positions."""
    last: Tensor | None = getattr(output, "last_hidden_state", None)
    if last is None:
        return output  # type: ignore[no-any-return]  # the caller names its type
    if last.ndim == 3 and any(key.endswith("cls_token") for key in model.state_dict()):
        return last[:, 0]
    pooled: Tensor | None = getattr(output, "pooler_output", None)
    if pooled is not None:
        return pooled.flatten(1)
    return last.mean(1) if last.ndim == 3 else last.mean((2, 3))
