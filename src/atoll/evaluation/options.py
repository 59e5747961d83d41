"""What a recipe says about evaluation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from atoll.core.config import Options
from atoll.core.errors import UserError, did_you_mean
from atoll.core.schema import AtLeast, Count, OneOf, Positive
from atoll.evaluation.protocols import FINE_TUNES, PROBES, FineTuneProtocol, ProbeProtocol, Select, find_probe

PROTOCOLS = ("geometry", "knn", "probe", *(f"probe-{name}" for name in PROBES), *FINE_TUNES)
Protocols = tuple[Annotated[str, OneOf(PROTOCOLS)], ...]


@dataclass(frozen=True)
class EvaluationOptions(Options, section="evaluation"):
    """The recipe's ``[evaluation]`` section.

    Protocols are ``"knn"``, ``"geometry"``, ``"probe"`` (the probe that this section describes),
    ``"probe-NAME"`` (a paper's, untouched by this section), and ``"finetune-PERCENT"`` (SSD's) and
    ``"finetune-fedca-PERCENT"``, of the labels.

    Attributes:
        every: Rounds between evaluations during training; 0 evaluates only at the end.
        during: Protocols of an evaluation during training.
        at_end: Protocols of the last evaluation.
        batch_size: Images embedded at a time.
        knn_k: Neighbours that vote; fewer, with a warning, where there are fewer training images.
        knn_temperature: Temperature of their weights.
        probe: Name of a probe protocol.
        probe_epochs: Instead of the protocol's own; None keeps that, here and below.
        probe_lr: Learning rate.
        probe_batch_size: Features in a step.
        probe_standardise: Features to mean 0 and standard deviation 1 first.
        probe_select: Accuracy of the ``"last"`` epoch, or the ``"best"`` on the test set.
        finetune_select: For all fine-tuning, the accuracy of the ``"last"`` epoch, or the ``"best"`` of several
            looks at the test set.
        map_points: Images on the report's map of embeddings; 0 leaves the map out.
        geometry_samples: Images that the geometry is measured on, drawn by the seed where there are more.
    """

    every: Annotated[int, AtLeast(0)] = 0
    during: Protocols = ("knn", "geometry")
    at_end: Protocols = ("knn", "probe", "geometry")
    batch_size: Count = 512
    knn_k: Count = 200
    knn_temperature: Positive = 0.1
    probe: Annotated[str, OneOf(PROBES)] = "ssd"
    probe_epochs: Count | None = None
    probe_lr: Positive | None = None
    probe_batch_size: Count | None = None
    probe_standardise: bool | None = None
    probe_select: Select | None = None
    finetune_select: Select = "last"
    geometry_samples: Annotated[int, AtLeast(2)] = 10_000
    map_points: Annotated[int, AtLeast(0)] = 1000

    def probe_protocol(self) -> ProbeProtocol:
        """The named probe with this section's changes."""
        return find_probe(
            self.probe,
            epochs=self.probe_epochs,
            lr=self.probe_lr,
            batch_size=self.probe_batch_size,
            standardise=self.probe_standardise,
            select=self.probe_select,
        )

    def fine_tuning(self, protocol: FineTuneProtocol) -> FineTuneProtocol:
        """A protocol with this section's choice of the epoch."""
        return replace(protocol, select=self.finetune_select)


def check_protocols(names: tuple[str, ...], where: str) -> None:
    """Each is the name of a protocol.

    Raises:
        UserError: One is not.
    """
    for name in names:
        if name not in PROTOCOLS:
            raise UserError(f"{where} names the protocol {name!r}; {did_you_mean(name, PROTOCOLS)}")
