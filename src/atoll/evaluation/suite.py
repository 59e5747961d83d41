"""Evaluation of an encoder under named protocols: one flat dict of results and the protocols' constants."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TypeAlias

import torch
from torch import Tensor, nn

from atoll.core.errors import UserError
from atoll.core.rng import stream
from atoll.data.images import ImageSet
from atoll.data.views.options import PRESETS
from atoll.data.views.views import Views
from atoll.evaluation.client_tests import PREFIX, client_accuracies
from atoll.evaluation.embed import device_of, embed, sample
from atoll.evaluation.finetune import finetune, label_subset
from atoll.evaluation.geometry import geometry
from atoll.evaluation.knn import knn_predictions
from atoll.evaluation.options import EvaluationOptions, check_protocols
from atoll.evaluation.own import Representations, measure
from atoll.evaluation.probe import ProbeResult, linear_probe
from atoll.evaluation.protocols import FINE_TUNES, PAPERS_PROBES, FineTuneProtocol, ProbeProtocol

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
    client_tests: Mapping[int, Tensor] | None = None,
    device: torch.device | str | None = None,
    strict: bool = False,
) -> Results:
    """Evaluate a frozen encoder under named protocols.

    The encoder stays unchanged. The result depends only on the arguments: every protocol draws from a separate
    random stream, so it gives the same numbers alone and together with others.

    Args:
        encoder: The encoder.
        train: Training images of kNN and the probe; their labels, if any, are used only for these.
        test: Images on which all protocols are evaluated; ``train`` itself if no images are held out.
        views: Converts images to the encoder's input, and draws the two views of alignment.
        options: Constants of the protocols.
        seed: The run's seed.
        protocols: Names of the protocols, of Atoll's or of functions ``module:attribute`` (see
            `Representations`); None for the options' ``at_end``.
        client_ids: The client that holds each training image, -1 for none; with it, the uniformity of the
            training images is decomposed into pairs within a client and between two clients.
        client_tests: For client-local protocols, the rows of the test images of each client that uses this encoder
            (see `split_test`).
        device: Device of the computation; None for the encoder's device.
        strict: Refuse protocols that these images do not support, instead of measuring only the geometry.

    Shape:
        - client_ids: (N,) int, N training images

    Returns:
        Values that JSON supports, under ``"protocol/name"``: accuracies in [0, 1] as ``"knn/accuracy"`` and
        ``"probe/accuracy"``, ``"geometry/uniformity"`` and so on (see `geometry`), and the constants of each
        protocol. If labels or held-out images are missing, the results contain the geometry only, and ``"note"``,
        a sentence that says why.

    Raises:
        UserError: A protocol is unknown, there are fewer than two test images, representations are not finite, or
            a function fails (see `atoll.evaluation.own.measure`);
            with ``strict``, also if labels or held-out images that a protocol needs are missing.
    """
    names = tuple(options.at_end if protocols is None else protocols)
    check_protocols(names)
    if len(test) < 2 or len(train) < 1:
        raise UserError(
            f"evaluation needs at least 2 test images and 1 training image; "
            f"there are {len(test)} and {len(train)}"
        )
    results: Results = {}
    if (why := obstacle(train, test)) and (skipped := ", ".join(n for n in names if n != "geometry")):
        if strict:
            raise UserError(
                f"{skipped} cannot be measured, because {why}; use the protocol geometry, which needs none, "
                "or run the recipe on labelled images of which data.test_fraction holds some out"
            )
        names = ("geometry",)
        results["note"] = (
            f"{skipped}: not measured, because {why}; the geometry of the representation needs none"
        )
    local = tuple(name for name in names if name.startswith(PREFIX))
    if local and client_tests is None:
        why = "these test images are not split among the clients of a run"
        if strict:
            raise UserError(f"{', '.join(local)} cannot be measured, because {why}; use other protocols")
        names = tuple(name for name in names if name not in local)
        results["note"] = f"{', '.join(local)}: not measured, because {why}"
    device = torch.device(device) if device is not None else device_of(encoder)
    subject = _Subject(
        encoder, train, test, views, options, seed, device, client_ids, client_tests or {}, names
    )
    for name in names:
        found = EVALUATORS[name](subject) if name in EVALUATORS else _own(subject, name)
        results.update({f"{name}/{key}": value for key, value in found.items()})
    return results


def obstacle(train: ImageSet, test: ImageSet) -> str:
    """Reason why accuracies cannot be measured on these images; empty if they can."""
    unlabelled = [name for name, images in (("training", train), ("test", test)) if images.labels is None]
    if unlabelled:
        return f"the {' and '.join(unlabelled)} images have no labels"
    if test is train:  # every image would be its own nearest neighbour, and a probe would know its label
        return "no images are held out, and a classifier must not be tested on its training images"
    return ""


@dataclass
class _Subject:
    """The encoder and images under evaluation; features that several protocols use are computed once."""

    encoder: nn.Module
    train: ImageSet
    test: ImageSet
    views: Views
    options: EvaluationOptions
    seed: int
    device: torch.device
    client_ids: Tensor | None
    client_tests: Mapping[int, Tensor]
    protocols: tuple[str, ...]
    _probes: dict[ProbeProtocol, tuple[ProbeResult, int]] = field(default_factory=dict)

    @cached_property
    def train_h(self) -> Tensor:
        return self.features(self.train)

    @cached_property
    def test_h(self) -> Tensor:
        return self.features(self.test)

    def features(
        self, images: ImageSet, pixels_to_float: Callable[[Tensor], Tensor] | None = None, maps: bool = False
    ) -> Tensor:
        """Compute representations; by default, of images without augmentation."""
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
                f"the encoder gives values that are not finite for {bad} of {len(h)} images; if its training "
                "diverged, lower train.lr, otherwise correct the encoder"
            )
        return h

    @cached_property
    def knn_predictions(self) -> Tensor:
        return knn_predictions(
            self.train_h,
            _labels(self.train),
            self.test_h,
            _labels(self.test),
            self.options.knn_k,
            self.options.knn_temperature,
        )

    def probe(self, protocol: ProbeProtocol) -> tuple[ProbeResult, int]:
        """Fit a probe, once; return its result and the number of labels that it used."""
        if protocol in self._probes:
            return self._probes[protocol]
        rows = None
        if protocol.fraction < 1 or protocol.label_count:
            draws = stream(self.seed, "probe-labels")
            rows = label_subset(_labels(self.train), protocol.fraction, draws, protocol.label_count)
        train = self.train if rows is None else self.train.subset(rows)
        if protocol.normalise and not protocol.maps:
            train_h, test_h = self.train_h, self.test_h
            train_h = train_h if rows is None else train_h[rows.to(train_h.device)]
        else:  # feature maps are large: compute only those that are needed
            plain = partial(self.views.plain, normalise=protocol.normalise)
            train_h, test_h = (self.features(images, plain, protocol.maps) for images in (train, self.test))
        train_y = _labels(train)
        generator = stream(self.seed, "probe")
        result = linear_probe(train_h, train_y, test_h, _labels(self.test), protocol, generator)
        self._probes[protocol] = result, len(train_y)
        return self._probes[protocol]


def _labels(images: ImageSet) -> Tensor:
    assert images.labels is not None  # noqa: S101 - `evaluate` skips protocols whose labels are missing
    return images.labels


def _knn(subject: _Subject) -> Results:
    options = subject.options
    return {
        "accuracy": int(_correct(subject.knn_predictions, subject).sum()) / len(subject.test),
        "k": min(options.knn_k, len(subject.train)),
        "temperature": options.knn_temperature,
        "train_images": len(subject.train),
        "test_images": len(subject.test),
    }


def _probe(subject: _Subject, protocol: ProbeProtocol | None) -> Results:
    protocol = subject.options.probe_protocol(protocol)
    result, labels = subject.probe(protocol)
    return {
        "accuracy": result.accuracy,
        "last_accuracy": result.last_accuracy,
        "epoch": result.epoch,
        "train_images": labels,
        "test_images": len(subject.test),
        **protocol.constants(),
    }


def _correct(predictions: Tensor, subject: _Subject) -> Tensor:
    return predictions.cpu() == _labels(subject.test)


def _clients_knn(subject: _Subject) -> Results:
    options = subject.options
    return {
        **client_accuracies(_correct(subject.knn_predictions, subject), subject.client_tests),
        "k": min(options.knn_k, len(subject.train)),
        "temperature": options.knn_temperature,
    }


def _clients_probe(subject: _Subject, protocol: ProbeProtocol | None) -> Results:
    protocol = subject.options.probe_protocol(protocol)
    result, _ = subject.probe(protocol)
    return {
        **client_accuracies(_correct(result.predictions, subject), subject.client_tests),
        "epoch": result.epoch,
        **protocol.constants(),
    }


def _finetune(subject: _Subject, protocol: FineTuneProtocol) -> Results:
    protocol = subject.options.fine_tuning(protocol)
    if protocol.local_epochs and (subject.client_ids is None or not bool((subject.client_ids >= 0).any())):
        raise UserError(
            f"{protocol.name} trains in the federation, and no client holds these images; "
            "evaluate on the recipe's own"
        )
    views, trained = subject.views, subject.views.settings
    # The protocol's crops, with the normalisation of the training views and flips only if these had flips.
    settings = replace(PRESETS["finetune"], flip=trained.flip, mean=trained.mean, std=trained.std)
    result = finetune(
        subject.encoder,
        subject.train,
        subject.test,
        protocol,
        stream(subject.seed, "finetune"),
        augment=Views(settings, views.image_size, views.size, views.channels),
        pixels_to_float=views.plain,
        device=subject.device,
        client_ids=subject.client_ids,
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


def _own(subject: _Subject, name: str) -> Results:
    """Measure with a function of the user's code, on copies: it may change all that it is given."""
    encoder, device = deepcopy(subject.encoder).eval(), subject.device
    for weight in encoder.parameters():  # as after loading its file, in which nothing is frozen
        weight.requires_grad_(weight.is_floating_point())
    representations = Representations(
        train_h=subject.train_h.clone(),
        train_labels=_labels(subject.train).to(device, copy=True),
        test_h=subject.test_h.clone(),
        test_labels=_labels(subject.test).to(device, copy=True),
        encoder=encoder,
        train=_copy(subject.train),
        test=_copy(subject.test),
        to_input=subject.views.plain,
    )
    return {**measure(name, representations, subject.seed)}


def _copy(images: ImageSet) -> ImageSet:
    """Copy all but the pixels, of which `gather` makes copies."""
    columns = {name: values.clone() for name, values in images.columns.items()}
    return replace(images, labels=_labels(images).clone(), classes=[*images.classes], columns=columns)


Evaluator: TypeAlias = Callable[[_Subject], Results]

_PROBES = {"probe": None, **PAPERS_PROBES}
EVALUATORS: dict[str, Evaluator] = {
    "geometry": _geometry,
    "knn": _knn,
    f"{PREFIX}knn": _clients_knn,
    **{name: partial(_probe, protocol=protocol) for name, protocol in _PROBES.items()},
    **{f"{PREFIX}{name}": partial(_clients_probe, protocol=one) for name, one in _PROBES.items()},
    **{name: partial(_finetune, protocol=protocol) for name, protocol in FINE_TUNES.items()},
}
