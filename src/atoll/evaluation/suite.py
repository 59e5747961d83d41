"""All that a run asks about its encoder, as one flat dict of numbers with the constants that made them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TypeAlias

import torch
from torch import Tensor, nn

from atoll.core.errors import UserError
from atoll.core.rng import stream
from atoll.data.images import ImageSet
from atoll.data.views.options import PRESETS
from atoll.data.views.views import Views
from atoll.evaluation.embed import device_of, embed, sample
from atoll.evaluation.finetune import finetune, label_subset
from atoll.evaluation.geometry import geometry
from atoll.evaluation.knn import knn_accuracy
from atoll.evaluation.options import EvaluationOptions, check_protocols
from atoll.evaluation.probe import linear_probe
from atoll.evaluation.protocols import FINE_TUNES, PROBES, FineTuneProtocol, ProbeProtocol

Results: TypeAlias = dict[str, bool | float | int | str | list[float]]


def evaluate(
    encoder: nn.Module,
    train: ImageSet,
    test: ImageSet,
    views: Views,
    options: EvaluationOptions,
    *,
    seed: int,
    protocols: Sequence[str] | None = None,
    client_ids: Tensor | None = None,
    device: torch.device | str | None = None,
    strict: bool = False,
) -> Results:
    """Measures a frozen encoder under named protocols.

    The encoder leaves as it came. The result depends on the arguments alone: every protocol draws from its
    own stream of the seed, so one measured alone gives the same numbers as among others.

    Args:
        encoder: the encoder.
        train: images that kNN and the probe learn from; their labels, if any, are used here only.
        test: images that everything is measured on; ``train`` itself where none are held out.
        views: makes images what the encoder reads, and the two views of alignment.
        options: constants.
        seed: of the run.
        protocols: which; None for the options' ``at_end``.
        client_ids: which client holds each training image, -1 for none; splits the uniformity of the
            training images into pairs within a client and across two.
        device: where to compute; None for the encoder's own.
        strict: refuse protocols that these images do not allow, instead of measuring the geometry alone.

    Shape:
        - client_ids: (N,) int, N training images

    Returns:
        Values that JSON can hold, under ``"protocol/name"``: accuracies in [0, 1] as ``"knn/accuracy"`` and
        ``"probe/accuracy"``, ``"geometry/uniformity"`` and so on (see `geometry`), and each constant beside
        them. If labels or held-out images are missing, the geometry alone, and ``"note"``, a sentence that
        says why.

    Raises:
        UserError: an unknown protocol, fewer than two test images, or representations that are not finite;
            with ``strict``, labels or held-out images that a protocol needs and that are missing.
    """
    names = tuple(options.at_end if protocols is None else protocols)
    check_protocols(names, "evaluation")
    if len(test) < 2 or len(train) < 1:
        raise UserError(
            f"evaluation needs at least 2 test images and 1 training image; "
            f"there are {len(test)} and {len(train)}"
        )
    results: Results = {}
    if (why := _obstacle(train, test)) and (skipped := ", ".join(n for n in names if n != "geometry")):
        if strict:
            raise UserError(
                f"{skipped} cannot be measured, because {why}; ask for the protocol geometry, which needs none, "
                "or run the recipe on labelled images of which data.test_fraction holds some out"
            )
        names = ("geometry",)
        results["note"] = (
            f"{skipped}: not measured, because {why}; the geometry of the representation needs none"
        )
    device = torch.device(device) if device is not None else device_of(encoder)
    subject = _Subject(encoder, train, test, views, options, seed, device, client_ids, names)
    for name in names:
        found = MEASURES[name](subject)
        results.update({f"{name}/{key}": value for key, value in found.items()})
    return results


def _obstacle(train: ImageSet, test: ImageSet) -> str:
    """Why no accuracy can be measured on these images; empty if it can."""
    unlabelled = [name for name, images in (("training", train), ("test", test)) if images.labels is None]
    if unlabelled:
        return f"the {' and '.join(unlabelled)} images have no labels"
    if test is train:  # an image is its own nearest neighbour, and a probe has been told its label
        return "no images are held out, and a classifier knows those that it learns from"
    return ""


@dataclass
class _Subject:
    """What is measured. The features that several protocols read are computed once."""

    encoder: nn.Module
    train: ImageSet
    test: ImageSet
    views: Views
    options: EvaluationOptions
    seed: int
    device: torch.device
    client_ids: Tensor | None
    protocols: tuple[str, ...]

    @cached_property
    def train_h(self) -> Tensor:
        return self.features(self.train)

    @cached_property
    def test_h(self) -> Tensor:
        return self.features(self.test)

    def features(
        self, images: ImageSet, pixels_to_float: Callable[[Tensor], Tensor] | None = None, maps: bool = False
    ) -> Tensor:
        """Representations, of un-augmented images unless said otherwise."""
        h = embed(
            self.encoder,
            pixels_to_float or self.views.plain,
            images.images,
            batch_size=self.options.batch_size,
            device=self.device,
            maps=maps,
        )
        if bad := int((~h.isfinite().all(1)).sum()):
            raise UserError(
                f"the encoder gives values that are not finite for {bad} of {len(h)} images: its training "
                "diverged; lower train.lr"
            )
        return h


def _labels(images: ImageSet) -> Tensor:
    assert images.labels is not None  # noqa: S101 - `evaluate` leaves out what needs labels
    return images.labels


def _knn(subject: _Subject) -> Results:
    options = subject.options
    accuracy = knn_accuracy(
        subject.train_h,
        _labels(subject.train),
        subject.test_h,
        _labels(subject.test),
        options.knn_k,
        options.knn_temperature,
    )
    return {
        "accuracy": accuracy,
        "k": min(options.knn_k, len(subject.train)),
        "temperature": options.knn_temperature,
        "train_images": len(subject.train),
        "test_images": len(subject.test),
    }


def _probe(subject: _Subject, protocol: ProbeProtocol | None = None) -> Results:
    protocol = protocol or subject.options.probe_protocol()
    train_h, test_h = (
        (subject.train_h, subject.test_h)
        if protocol.normalise and not protocol.maps
        else (
            subject.features(
                images, partial(subject.views.plain, normalise=protocol.normalise), protocol.maps
            )
            for images in (subject.train, subject.test)
        )
    )
    train_y = _labels(subject.train)
    if protocol.fraction < 1:
        rows = label_subset(train_y, protocol.fraction, stream(subject.seed, "probe-labels"))
        train_h, train_y = train_h[rows.to(train_h.device)], train_y[rows]
    generator = stream(subject.seed, "probe")
    result = linear_probe(train_h, train_y, test_h, _labels(subject.test), protocol, generator)
    return {
        "accuracy": result.accuracy,
        "last_accuracy": result.last_accuracy,
        "epoch": result.epoch,
        "train_images": len(train_y),
        "test_images": len(subject.test),
        **protocol.constants(),
    }


def _finetune(subject: _Subject, protocol: FineTuneProtocol) -> Results:
    protocol = subject.options.fine_tuning(protocol)
    views, own = subject.views, subject.views.settings
    # The protocol's crops; values as the encoder is used to them, and mirrored only if its own views were.
    settings = replace(PRESETS["finetune"], flip=own.flip, mean=own.mean, std=own.std)
    result = finetune(
        subject.encoder,
        subject.train,
        subject.test,
        protocol,
        stream(subject.seed, "finetune"),
        augment=Views(settings, views.image_size, views.size, views.channels),
        pixels_to_float=views.plain,
        device=subject.device,
    )
    return {
        "accuracy": result.accuracy,
        "last_accuracy": result.last_accuracy,
        "epoch": result.epoch,
        "labels": result.labels,
        "test_images": len(subject.test),
        "flip": settings.flip,
        **protocol.constants(),
    }


def _geometry(subject: _Subject) -> Results:
    size, seed = subject.options.geometry_samples, subject.seed
    rows = sample(len(subject.test), size, seed, "geometry-test")
    some = subject.test.subset(rows)
    draws = stream(seed, "geometry-views")
    view1, view2 = (subject.features(some, lambda pixels: subject.views(pixels, draws)) for _ in range(2))
    labelled = subject.protocols != ("geometry",)
    h = subject.test_h[rows.to(subject.device)] if labelled else subject.features(some)
    results: Results = {"images": len(some), "of_test_images": len(subject.test), "t": 2.0}
    clients = None
    if subject.client_ids is not None:
        held = (subject.client_ids >= 0).nonzero().squeeze(1)
        held = held[sample(len(held), size, seed, "geometry-clients")]
        client_h = (
            subject.train_h[held.to(subject.device)]
            if labelled
            else subject.features(subject.train.subset(held))
        )
        clients = (client_h, subject.client_ids[held].to(subject.device))
        results["client_images"] = len(held)
    return results | geometry(h, views=(view1, view2), clients=clients, t=2.0)


Measure: TypeAlias = Callable[[_Subject], Results]

MEASURES: dict[str, Measure] = {
    "geometry": _geometry,
    "knn": _knn,
    "probe": _probe,
    **{f"probe-{name}": partial(_probe, protocol=protocol) for name, protocol in PROBES.items()},
    **{name: partial(_finetune, protocol=protocol) for name, protocol in FINE_TUNES.items()},
}
