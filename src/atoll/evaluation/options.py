"""The recipe's ``[evaluation]`` section."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from atoll.core.config import Options
from atoll.core.errors import UserError, did_you_mean
from atoll.core.given import names_code
from atoll.core.schema import AtLeast, Count, OneOf, OneOfOr, Positive, Whole
from atoll.evaluation.client_tests import PREFIX
from atoll.evaluation.protocols import (
    FINE_TUNES,
    PAPERS_PROBES,
    PROBES,
    FineTuneProtocol,
    ProbeProtocol,
    Select,
    find_probe,
    shortened,
)

CLASSIFIERS = ("knn", "probe", *PAPERS_PROBES)
PROTOCOLS = ("geometry", *CLASSIFIERS, *(f"{PREFIX}{name}" for name in CLASSIFIERS), *FINE_TUNES)
OWN = '"module:attribute", a function of your code'
Protocols = tuple[Annotated[str, OneOfOr(PROTOCOLS, OWN)], ...]


@dataclass(frozen=True)
class EvaluationOptions(Options, section="evaluation"):
    """The recipe's ``[evaluation]`` section.

    Protocols are ``"knn"``, ``"geometry"``, ``"probe"`` (the probe of this section) and ``"probe-NAME"`` (a paper's
    probe, of which this section changes only the maximum number of epochs). ``"finetune-PERCENT"`` (SSD),
    ``"finetune-fedca-PERCENT"`` and ``"finetune-fedca-federated-PERCENT"`` (by FedAvg, on each client's share) use
    this percentage of the labels, ``"probe-ssd-N-labels"`` and ``"finetune-N-labels"`` this number of labels. With
    the prefix ``"clients-"`` (``"clients-probe"``), kNN and the probes test each client on its share of the test
    images, with the model that it uses (see `split_test`). ``"module:attribute"`` is a function of the user's code
    (see `Representations`).

    Attributes:
        every: Rounds between evaluations during training; 0 evaluates only at the end.
        patience: Early stopping: the run ends after this many consecutive evaluations that do not raise the highest
            kNN accuracy since round 1; by default, it ends after ``train.rounds`` only. These evaluations choose
            the last round, so results on the same test images are somewhat optimistic; with
            ``data.validation_fraction`` they are not.
        during: Protocols of the evaluations during training.
        at_end: Protocols of the last evaluation.
        batch_size: Number of images that are embedded at a time.
        knn_k: Number of neighbours that vote. If there are fewer training images, all of them vote, with a warning.
        knn_temperature: Temperature of the neighbours' weights.
        probe: Name of a probe protocol.
        probe_epochs: Number of epochs of the probe; by default the protocol's.
        probe_lr: Learning rate of the probe; by default the protocol's.
        probe_batch_size: Number of features in a step of the probe; by default the protocol's.
        probe_standardise: Standardise features to mean 0 and standard deviation 1; by default as in the protocol.
        probe_select: Which accuracy counts: that of the ``"last"`` epoch, or the ``"best"`` on the test set; by
            default as in the protocol.
        finetune_select: Which accuracy of every fine-tuning counts: that of the ``"last"`` epoch, or the ``"best"``
            of several evaluations on the test set.
        max_epochs: Maximum number of epochs of every probe and fine-tuning, including the papers'; by default the
            protocol's.
        measures: What the server measures of a round's models, with every engine: ``"norms"`` of h and z,
            ``"layers"`` (the cosine between local and received models by layer), ``"distances"`` between the
            weights and ``"angles"`` between the representations of local models, ``"consensus"`` of a graph of
            clients.
        measures_every: Rounds between two measurements; the last round is always measured.
        measured_clients: Maximum number of a round's local models whose distances and angles are measured.
        map_points: Number of images on the report's map of embeddings; 0 omits the map.
        geometry_samples: Maximum number of images on which the geometry is measured. If there are more, a sample is
            drawn with the recipe's seed.
    """

    every: Whole = 0
    patience: Count | None = None
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
    max_epochs: Count | None = None
    geometry_samples: Annotated[int, AtLeast(2)] = 10_000
    measures: tuple[Literal["norms", "layers", "distances", "angles", "consensus"], ...] = ()
    measures_every: Count = 1
    measured_clients: Annotated[int, AtLeast(2)] = 5
    map_points: Whole = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.patience is not None and not (self.every and "knn" in self.during):
            raise UserError(
                "evaluation.patience waits for kNN during training, which is not evaluated; set evaluation.every "
                "and 'knn' in evaluation.during"
            )

    def probe_protocol(self, paper: ProbeProtocol | None = None) -> ProbeProtocol:
        """Return a paper's probe, or the named probe with this section's changes."""
        chosen = paper or find_probe(
            self.probe,
            epochs=self.probe_epochs,
            lr=self.probe_lr,
            batch_size=self.probe_batch_size,
            standardise=self.probe_standardise,
            select=self.probe_select,
        )
        return shortened(chosen, self.max_epochs)

    def reading_maps(self) -> list[str]:
        """Return the names of the run's protocols whose classifier reads feature maps instead of h."""
        probes = {"probe": self.probe_protocol(), **PAPERS_PROBES}
        reading = {name for name, probe in probes.items() if probe.maps}
        during = self.during if self.every else ()
        return [name for name in (*during, *self.at_end) if name.removeprefix(PREFIX) in reading]

    def fine_tuning(self, protocol: FineTuneProtocol) -> FineTuneProtocol:
        """Return a protocol with this section's choice of the epoch."""
        return shortened(replace(protocol, select=self.finetune_select), self.max_epochs)


def check_protocols(names: tuple[str, ...]) -> None:
    """Check that all names are names of protocols, or of the user's code.

    Raises:
        UserError: A name is unknown.
    """
    for name in names:
        if name not in PROTOCOLS and not names_code(name):
            raise UserError(f"evaluation names the protocol {name!r}; {did_you_mean(name, PROTOCOLS)}")
