"""The papers' evaluation protocols by name, constants and all.

Accuracies under different protocols cannot be compared, so every result carries the constants of its own.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

from atoll.core.config import Options
from atoll.core.errors import UserError, did_you_mean
from atoll.core.schema import AtLeast, Count, Positive, Share

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Select = Literal["last", "best"]
Optimizer = Literal["adam", "sgd"]


@dataclass(frozen=True)
class ProbeProtocol(Options, section="probe"):
    """A linear classifier on frozen features of un-augmented images.

    Attributes:
        name: How results call it.
        optimizer: ``"adam"`` or ``"sgd"``.
        lr: The first learning rate.
        epochs: Passes over the training features.
        batch_size: Features in a step; a last, smaller batch is used too.
        momentum: Of SGD.
        nesterov: Of SGD.
        weight_decay: L2 penalty.
        schedule: ``"constant"``, ``"step"`` (by epoch) or ``"cosine"`` (by step, to 0).
        milestones: Epochs after which ``"step"`` multiplies the rate by ``decay``.
        decay: See ``milestones``.
        shuffle: A new order for every epoch.
        standardise: Subtract the training features' mean and divide by their standard deviation.
        select: Accuracy after the ``"last"`` epoch, or the ``"best"`` of all epochs on the test set (which
            flatters; for reproduction only).
        maps: Read the feature maps before the global pooling instead of h.
        normalise: Images normalised as in training; False leaves them on [0, 1].
        fraction: Share of each class's training labels that is used; at least one of a class.
        differs: What its paper's code does otherwise than we do, or does not say; empty when nothing.
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
    differs: str = ""

    def constants(self) -> dict[str, bool | float | int | str]:
        """All of it, as a report prints it beside the accuracy."""
        return _printable(self)


def _printable(protocol: DataclassInstance) -> dict[str, bool | float | int | str]:
    return {
        name: " ".join(map(str, value)) if isinstance(value, tuple) else value
        for name, value in asdict(protocol).items()
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

_FEW_LABELS = {  # the papers that repeat their probe with few labels, and what is open about it
    "l-dawa": f"{_PAPERS['l-dawa'].differs}; few labels may have trained it too",
    "dec-ssl": _PAPERS["dec-ssl"].differs,
}

PROBES = _PAPERS | {
    f"{name}-{percent}": replace(
        _PAPERS[name], name=f"{name}-{percent}", fraction=percent / 100, differs=differs
    )
    for name, differs in _FEW_LABELS.items()
    for percent in (1, 10)
}


@dataclass(frozen=True)
class FineTuneProtocol(Options, section="finetune"):
    """The whole encoder and a head on it, trained on few labels.

    Attributes:
        name: How results call it.
        fraction: Share of each class's training labels that is used; at least one of a class.
        optimizer: ``"adam"`` or ``"sgd"``.
        encoder_lr: Learning rate for the encoder.
        head_lr: And for the head.
        momentum: Of SGD.
        hidden: Widths of the head's hidden layers, a ReLU after each; none: a linear head.
        epochs: Passes over the labelled images.
        batch_size: Images in a step.
        every: Epochs between two looks at the test set, where the best of them is selected.
        select: Accuracy after the ``"last"`` epoch, or the ``"best"`` of those looks (for reproduction only).
        differs: What its paper does otherwise than we do, or does not say; empty when nothing.
    """

    name: str
    fraction: Share
    optimizer: Optimizer = "sgd"
    encoder_lr: float = 1e-3
    head_lr: float = 0.3
    momentum: float = 0.9
    hidden: tuple[int, ...] = ()
    epochs: Count = 200
    batch_size: Annotated[int, AtLeast(2, "for BatchNorm")] = 128
    every: Count = 50
    select: Select = "last"
    differs: str = ""

    def constants(self) -> dict[str, bool | float | int | str]:
        """All of it, as a report prints it beside the accuracy."""
        return _printable(self)


_FEDCA = (
    "the paper states no batch size, hidden width or augmentation, and labels a share of each client's images"
)

FINE_TUNES = {
    protocol.name: protocol
    for protocol in (
        # semi_eval.py of SSD's released code, which prints the best of four looks at the test set:
        # `evaluation.finetune_select = "best"`.
        *(FineTuneProtocol(f"finetune-{percent}", percent / 100) for percent in (1, 10)),
        # FedCA's semi-supervised and transfer learning: an MLP of one hidden layer on the encoder.
        *(
            FineTuneProtocol(
                f"finetune-fedca-{percent}",
                percent / 100,
                optimizer="adam",
                head_lr=1e-3,
                hidden=(2048,),
                epochs=100,
                differs=_FEDCA,
            )
            for percent in (1, 10, 100)
        ),
    )
}


def find_probe(name: str, **changes: object) -> ProbeProtocol:
    """A named protocol, with every change that is not None; the name then says that it was changed.

    Raises:
        UserError: There is none of that name, or a change means nothing.

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
    return replace(protocol, **changed, name=f"{name}, changed: {', '.join(sorted(changed))}")  # type: ignore[arg-type]
