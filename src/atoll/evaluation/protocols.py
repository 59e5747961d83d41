"""The papers' evaluation protocols by name, constants and all.

Accuracies under different protocols cannot be compared, so every result carries the constants of its own.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from atoll.errors import UserError, did_you_mean


@dataclass(frozen=True)
class ProbeProtocol:
    """A linear classifier on frozen features of un-augmented images.

    Attributes:
        name: how results call it.
        optimizer: ``"adam"`` or ``"sgd"``.
        lr: the first learning rate.
        epochs: passes over the training features.
        batch_size: features in a step; a last, smaller batch is used too.
        momentum: of SGD.
        nesterov: of SGD.
        weight_decay: L2 penalty.
        schedule: ``"constant"``, ``"step"`` (by epoch) or ``"cosine"`` (by step, to 0).
        milestones: epochs after which ``"step"`` multiplies the rate by ``decay``.
        decay: see ``milestones``.
        shuffle: a new order for every epoch.
        standardise: subtract the training features' mean and divide by their standard deviation.
        select: accuracy after the ``"last"`` epoch, or the ``"best"`` of all epochs on the test set (which
            flatters; for reproduction only).
        maps: read the feature maps before the global pooling instead of h.
        normalise: images normalised as in training; False leaves them on [0, 1].
        differs: what its paper's code does otherwise than we do, or does not say; empty when nothing.
    """

    name: str
    optimizer: str
    lr: float
    epochs: int
    batch_size: int
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    schedule: str = "constant"
    milestones: tuple[int, ...] = ()
    decay: float = 0.1
    shuffle: bool = True
    standardise: bool = False
    select: str = "last"
    maps: bool = False
    normalise: bool = True
    differs: str = ""

    def __post_init__(self) -> None:
        """Refuse what cannot be trained.

        Raises:
            UserError: naming the constant and what it may be.
        """
        for name, known in (
            ("optimizer", ("adam", "sgd")),
            ("schedule", ("constant", "cosine", "step")),
            ("select", ("best", "last")),
        ):
            value = getattr(self, name)
            if value not in known:
                raise UserError(f"the probe's {name} is {value!r}; {did_you_mean(str(value), known)}")
        for name in ("lr", "epochs", "batch_size"):
            if not getattr(self, name) > 0:
                raise UserError(f"the probe's {name} is {getattr(self, name)}; it must be above 0")

    def constants(self) -> dict[str, bool | float | int | str]:
        """All of it, as a report prints it beside the accuracy."""
        return {
            name: " ".join(map(str, value)) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }


PROBES = {
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


@dataclass(frozen=True)
class FineTuneProtocol:
    """The whole encoder and a linear head, trained on a few labels.

    Attributes:
        name: how results call it.
        fraction: share of each class's training labels that is used; at least one of a class.
        encoder_lr: SGD's learning rate for the encoder.
        head_lr: and for the linear head.
        momentum: of SGD.
        epochs: passes over the labelled images.
        batch_size: images in a step.
        every: epochs between two looks at the test set, where the best of them is selected.
        select: accuracy after the ``"last"`` epoch, or the ``"best"`` of those looks (for reproduction only).
    """

    name: str
    fraction: float
    encoder_lr: float = 1e-3
    head_lr: float = 0.3
    momentum: float = 0.9
    epochs: int = 200
    batch_size: int = 128
    every: int = 50
    select: str = "last"

    def __post_init__(self) -> None:
        """Refuse what cannot be trained.

        Raises:
            UserError: naming the constant and what it may be.
        """
        if not 0 < self.fraction <= 1:
            raise UserError(f"fine-tuning's fraction of labels is {self.fraction}; it must be in (0, 1]")
        if self.select not in ("best", "last"):
            raise UserError(f"fine-tuning's select is {self.select!r}; it must be 'best' or 'last'")
        if self.batch_size < 2:
            raise UserError(f"fine-tuning's batch_size is {self.batch_size}; BatchNorm needs at least 2")
        for name in ("epochs", "every"):
            if getattr(self, name) < 1:
                raise UserError(f"fine-tuning's {name} is {getattr(self, name)}; it must be at least 1")

    def constants(self) -> dict[str, float | int | str]:
        """All of it, as a report prints it beside the accuracy."""
        return asdict(self)


# semi_eval.py of SSD's released code, which prints the best of four looks at the test set: `select = "best"`.
FINE_TUNES = {
    name: FineTuneProtocol(name, fraction) for name, fraction in (("finetune-1", 0.01), ("finetune-10", 0.1))
}


def find_probe(name: str, **changes: object) -> ProbeProtocol:
    """A named protocol, with every change that is not None; the name then says that it was changed.

    Raises:
        UserError: there is none of that name, or a change means nothing.
    """
    if name not in PROBES:
        raise UserError(f"there is no probe protocol {name!r}; {did_you_mean(name, PROBES)}")
    protocol = PROBES[name]
    changed = {key: value for key, value in changes.items() if value not in (None, getattr(protocol, key))}
    if not changed:
        return protocol
    return replace(protocol, **changed, name=f"{name}, changed: {', '.join(sorted(changed))}")  # type: ignore[arg-type]
