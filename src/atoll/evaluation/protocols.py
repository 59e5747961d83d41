"""The papers' evaluation protocols by name, with their constants.

Accuracies under different protocols cannot be compared, so every result includes the constants of its protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from atoll.core.config import Options
from atoll.core.errors import UserError, did_you_mean
from atoll.core.schema import AtLeast, Count, Positive, Share

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Select = Literal["last", "best"]
Optimizer = Literal["adam", "adamw", "sgd"]


@dataclass(frozen=True)
class ProbeProtocol(Options, section="probe"):
    """A linear classifier on frozen features of images without augmentation.

    Attributes:
        name: Name in results.
        optimizer: ``"adam"``, ``"adamw"`` or ``"sgd"``.
        lr: Initial learning rate.
        epochs: Number of passes over the training features.
        batch_size: Number of features in a step; the last batch may be smaller.
        momentum: Momentum of SGD.
        nesterov: Use Nesterov momentum in SGD.
        weight_decay: L2 penalty (decoupled for AdamW).
        schedule: ``"constant"``, ``"step"`` (by epoch) or ``"cosine"`` (by step, to 0).
        milestones: Epochs after which ``"step"`` multiplies the rate by ``decay``.
        decay: Factor of the rate at each of the ``milestones``.
        shuffle: Shuffle the features in every epoch.
        standardise: Subtract the training features' mean and divide by their standard deviation.
        select: Accuracy after the ``"last"`` epoch, or the ``"best"`` of all epochs on the test set (optimistically
            biased; only for reproduction).
        maps: Read the feature maps before the global pooling instead of h.
        normalise: Normalise images as in training; False leaves them on [0, 1].
        fraction: Share of each class's training labels that is used; at least one label of each class.
        label_count: Number of training labels that is used in place of ``fraction``; None for ``fraction``.
        differs: Differences from the paper or its code, and what these leave open; empty if there are none.
    """

    name: str
    optimizer: Optimizer
    lr: Positive
    epochs: Count
    batch_size: Count
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    schedule: Literal["constant", "step", "cosine"] = "constant"
    milestones: tuple[int, ...] = ()
    decay: float = 0.1
    shuffle: bool = True
    standardise: bool = False
    select: Select = "last"
    maps: bool = False
    normalise: bool = True
    fraction: Share = 1.0
    label_count: Count | None = None
    differs: str = ""

    def constants(self) -> dict[str, bool | float | int | str]:
        """Return all constants, as a report prints them next to the accuracy."""
        return _printable(self)


def _printable(protocol: DataclassInstance) -> dict[str, bool | float | int | str]:
    return {
        name: " ".join(map(str, value)) if isinstance(value, tuple) else value
        for name, value in asdict(protocol).items()
        if value is not None
    }


_PAPERS = {
    protocol.name: protocol
    for protocol in (
        # linear_eval.py of the released code; [0, 1] inputs, as its training.
        ProbeProtocol("ssd", "adam", lr=3e-3, epochs=200, batch_size=512),
        ProbeProtocol(
            "l-dawa",
            "sgd",
            lr=0.01,
            epochs=100,
            batch_size=128,
            momentum=0.9,
            nesterov=True,
            schedule="step",
            milestones=(60, 80),
            maps=True,
            normalise=False,
            differs="the paper's encoder may have left eval mode and updated its BatchNorm",
        ),
        ProbeProtocol(
            "dec-ssl",
            "adam",
            lr=1e-3,
            epochs=50,
            batch_size=256,
            weight_decay=1e-6,
            select="best",
            differs="the paper augments the training images and recalibrates BatchNorm in the first epoch",
        ),
        # As the released code probes the masked autoencoder: on the class token, with all patches visible.
        ProbeProtocol(
            "dec-ssl-mae",
            "adamw",
            lr=3e-4,
            epochs=50,
            batch_size=256,
            weight_decay=0.05,
            select="best",
        ),
        ProbeProtocol(
            "fedca",
            "adam",
            lr=1e-3,
            epochs=100,
            batch_size=128,
            differs="the paper states neither learning rate nor batch size; these are its pre-training's",
        ),
        ProbeProtocol("easyfl", "adam", lr=3e-3, epochs=200, batch_size=2048, shuffle=False),
        ProbeProtocol(
            "orchestra",
            "sgd",
            lr=30.0,
            epochs=50,
            batch_size=256,
            momentum=0.9,
            schedule="cosine",
            shuffle=False,
            differs="the paper crops and flips the training images and drops the last, smaller batch",
        ),
    )
}

_FEW_LABELS = {  # the papers that repeat their probe with few labels, and what they leave open
    "l-dawa": f"{_PAPERS['l-dawa'].differs}; few labels may have trained it too",
    "dec-ssl": _PAPERS["dec-ssl"].differs,
}

_COUNTS = (50, 100, 500)

PROBES = (
    _PAPERS
    | {
        f"{name}-{percent}": replace(
            _PAPERS[name], name=f"{name}-{percent}", fraction=percent / 100, differs=differs
        )
        for name, differs in _FEW_LABELS.items()
        for percent in (1, 10)
    }
    | {
        f"ssd-{count}-labels": replace(_PAPERS["ssd"], name=f"ssd-{count}-labels", label_count=count)
        for count in _COUNTS
    }
)
# By the names of evaluation.at_end.
PAPERS_PROBES = {f"probe-{name}": probe for name, probe in PROBES.items()}


@dataclass(frozen=True)
class FineTuneProtocol(Options, section="finetune"):
    """Training of the whole encoder with a head on few labels.

    Attributes:
        name: Name in results.
        fraction: Share of each class's training labels that is used; at least one label of each class.
        label_count: Number of training labels that is used in place of ``fraction``, of each client if
            ``local_epochs`` is set; None for ``fraction``.
        optimizer: ``"adam"`` or ``"sgd"``.
        encoder_lr: Learning rate of the encoder.
        head_lr: Learning rate of the head.
        momentum: Momentum of SGD.
        hidden: Widths of the head's hidden layers, each followed by a ReLU; empty for a linear head.
        epochs: Number of passes over the labelled images.
        batch_size: Number of images in a step.
        local_epochs: Number of epochs of each client between two averages, if each client trains on its own labels
            and FedAvg averages the models; 0 if all labels are in one place. `epochs` is a multiple of it.
        every: Epochs between two evaluations on the test set, if the best of them is selected.
        select: Accuracy after the ``"last"`` epoch, or the ``"best"`` of these evaluations (only for reproduction).
        differs: Differences from the paper, and what it leaves open; empty if there are none.
    """

    name: str
    fraction: Share = 1.0
    label_count: Count | None = None
    optimizer: Literal["adam", "sgd"] = "sgd"
    encoder_lr: float = 1e-3
    head_lr: float = 0.3
    momentum: float = 0.9
    hidden: tuple[int, ...] = ()
    epochs: Count = 200
    batch_size: Annotated[int, AtLeast(2, "for BatchNorm")] = 128
    local_epochs: Annotated[int, AtLeast(0)] = 0
    every: Count = 50
    select: Select = "last"
    differs: str = ""

    def constants(self) -> dict[str, bool | float | int | str]:
        """Return all constants, as a report prints them next to the accuracy."""
        return _printable(self)

    @property
    def labelled(self) -> str:
        """How many labels are used, in words."""
        return (
            f"{self.label_count} labels" if self.label_count else f"{100 * self.fraction:g} % of the labels"
        )


_FEDCA = (
    "the paper states no batch size, hidden width or augmentation, and labels a share of each client's images"
)

_FEDERATED = "the paper states no batch size, hidden width, augmentation or rounds of fine-tuning"


def _fedca(name: str, percent: int, differs: str, local_epochs: int = 0) -> FineTuneProtocol:
    """FedCA's fine-tuning: an MLP with one hidden layer on the encoder, 100 epochs of Adam."""
    return FineTuneProtocol(
        name,
        fraction=percent / 100,
        optimizer="adam",
        head_lr=1e-3,
        hidden=(2048,),
        epochs=100,
        local_epochs=local_epochs,
        differs=differs,
    )


FINE_TUNES = {
    protocol.name: protocol
    for protocol in (
        # semi_eval.py of SSD's released code, which prints the best of four evaluations on the test set:
        # `evaluation.finetune_select = "best"`.
        *(FineTuneProtocol(f"finetune-{percent}", fraction=percent / 100) for percent in (1, 10)),
        # FedCA's semi-supervised and transfer learning: an MLP with one hidden layer on the encoder.
        *(_fedca(f"finetune-fedca-{percent}", percent, differs=_FEDCA) for percent in (1, 10, 100)),
        # The same in the federation, each client on its share of labels: 20 rounds of 5 epochs, as in pre-training.
        *(
            _fedca(f"finetune-fedca-federated-{percent}", percent, local_epochs=5, differs=_FEDERATED)
            for percent in (1, 10)
        ),
        # Atoll's own, for few labels: with SSD's large batch, an epoch would be a single step.
        *(
            FineTuneProtocol(
                f"finetune-{count}-labels",
                label_count=count,
                optimizer="adam",
                head_lr=1e-3,
                epochs=40,
                batch_size=32,
                every=10,
            )
            for count in _COUNTS
        ),
    )
}


def find_probe(name: str, **changes: object) -> ProbeProtocol:
    """Return a named protocol, with every change that is not None; its name then lists the changes.

    If the number of epochs changes, the milestones move in proportion.

    Raises:
        UserError: There is no protocol of that name, or a value is invalid.

    Example:
        >>> from atoll.evaluation import find_probe
        >>> find_probe("ssd", epochs=3).name
        'ssd, changed: epochs'
    """
    if name not in PROBES:
        raise UserError(f"there is no probe protocol {name!r}; {did_you_mean(name, PROBES)}")
    protocol = PROBES[name]
    changed = {key: value for key, value in changes.items() if value not in (None, getattr(protocol, key))}
    if not changed:
        return protocol
    name = f"{name}, changed: {', '.join(sorted(changed))}"
    made = replace(protocol, **changed, name=name)  # type: ignore[arg-type]
    return replace(made, milestones=_moved(protocol.milestones, made.epochs / protocol.epochs))


def _moved(milestones: Sequence[int], share: float) -> tuple[int, ...]:
    """Epochs, moved in proportion to a protocol's length."""
    return tuple(max(1, round(share * epoch)) for epoch in milestones)


Protocol = TypeVar("Protocol", ProbeProtocol, FineTuneProtocol)


def shortened(protocol: Protocol, max_epochs: int | None) -> Protocol:
    """Limit a protocol's epochs, and move what it does at certain epochs forward in proportion.

    Example:
        >>> from atoll.evaluation.protocols import PROBES, shortened
        >>> short = shortened(PROBES["l-dawa"], 50)
        >>> short.name, short.epochs, short.milestones
        ('l-dawa, at most 50 epochs', 50, (30, 40))
    """
    if max_epochs is None or protocol.epochs <= max_epochs:
        return protocol
    share = max_epochs / protocol.epochs
    changes: dict[str, Any] = {
        "epochs": max_epochs,
        "name": f"{protocol.name}, at most {max_epochs} epochs",
    }
    if isinstance(protocol, ProbeProtocol):
        changes["milestones"] = _moved(protocol.milestones, share)
    else:
        if protocol.local_epochs:  # whole rounds
            changes["local_epochs"] = local = min(protocol.local_epochs, max_epochs)
            changes["epochs"] = max_epochs // local * local
        changes["every"] = max(1, round(share * protocol.every))
    return replace(protocol, **changes)
