"""Views made by the user's own transform, which is called with one image at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from atoll.core.devices import upload
from atoll.core.errors import UserError
from atoll.core.fingerprint import fingerprint
from atoll.core.given import Given, class_given, names_code, not_given
from atoll.core.imports import describe_error, import_function
from atoll.core.process_state import process_kept, seed_streams
from atoll.core.text import type_words

_SEEDS = 2**32  # numpy takes no larger seed


def give_transform(transform: Any) -> Given:
    """Name a transform that Python code gives, with a fingerprint of its code and parameters.

    Raises:
        UserError: It is not callable, or is a class.

    Example:
        >>> from torchvision.transforms import v2
        >>> from atoll.data.views.transform import give_transform
        >>> give_transform(v2.RandomCrop(8)).partition("#")[0]
        'object:RandomCrop'
    """
    if not callable(transform):
        expected = "a function or object that is called with an image"
        raise not_given("transform", transform, "views.preset", expected)
    if isinstance(transform, type):
        raise class_given("transform", transform)
    name = getattr(transform, "__qualname__", type(transform).__qualname__)
    return Given.named(name, fingerprint(transform), transform)


class Transform:
    """The user's transform, called with one image at a time on the CPU.

    It gets an image, uint8 (C, H, W), and returns a view (C, size, size): uint8, which is normalised as Atoll's
    views are, or floats, which are used as they are. Before each call, the streams of torch, numpy and random are
    seeded from the stream of the client, round and view, so that the view of an image depends neither on other
    images nor on the process.

    Args:
        name: ``module:attribute``, or a `Given`.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(
        self,
        images: Tensor,
        generator: torch.Generator,
        size: int,
        normalise: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Make one view of every image.

        Args:
            images: The images.
            generator: Source of the seeds, on the CPU.
            size: Side of the views.
            normalise: Normalises views in [0, 1].

        Shape:
            images: uint8 (N, C, H, W) on any device; result: float32 (N, C, size, size) on the same device.

        Raises:
            UserError: The transform is missing, fails, or does not return a finite view.
        """
        seeds = torch.randint(_SEEDS, (len(images),), generator=generator).tolist()
        views = torch.empty(len(images), images.shape[1], size, size)
        with process_kept(), torch.no_grad():
            for row, (image, seed) in enumerate(zip(images.cpu(), seeds, strict=True)):
                seed_streams(seed)
                view = self._view(image, tuple(views.shape[1:]))
                views[row] = normalise(view / 255) if view.dtype == torch.uint8 else view
        return upload(views, images.device)

    @cached_property
    def _call(self) -> Callable[[Tensor], Any]:
        if isinstance(self.name, Given):
            given: Callable[[Tensor], Any] = self.name.value
            return given
        if names_code(self.name):
            return import_function(self.name, "views.transform")
        raise UserError(
            f"the transform {self.name!r} was given to its run as an object, which a file does not hold; pass "
            "it again as transform=…, or name it in the recipe as module:attribute"
        )

    def _view(self, image: Tensor, expected: tuple[int, ...]) -> Tensor:
        call = self._call
        try:
            view = call(image.clone())  # a transform may work in place
        except Exception as error:  # the user's code may raise any exception
            pillow = "; one for Pillow's images can begin with torchvision.transforms.ToPILImage()"
            raise UserError(
                f"views.transform = {self.name!r} fails for an image, {_words(image)}: {describe_error(error)}"
                f"{pillow if isinstance(error, AttributeError | TypeError) else ''}"
            ) from error
        right = isinstance(view, Tensor) and view.shape == expected
        if not right or not (view.is_floating_point() or view.dtype == torch.uint8):
            raise UserError(
                f"views.transform = {self.name!r} returns {_words(view)} for an image; it must return a tensor "
                f"of shape {expected}, uint8 or floats (views.size sets another size)"
            )
        plain: Tensor = view.as_subclass(Tensor)
        if not plain.isfinite().all():
            raise UserError(
                f"views.transform = {self.name!r} returns a view that is not finite for an image with the values "
                f"{int(image.min())} to {int(image.max())}; a division by the spread of a plain image, perhaps"
            )
        return plain


def _words(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return type_words(value)
