"""The recipe's ``[data]`` and ``[partition]`` sections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from atoll.core.config import Options
from atoll.core.errors import UserError
from atoll.core.schema import AtLeast, AtMost, Below, Count, OneOf, Positive
from atoll.data.decode import Decoding, Window
from atoll.data.partition.dirichlet import VARIANTS

SOURCES = ("digits", "parquet", "folder", "clients", "images", "hub", "torchvision")
KINDS = ("iid", "dirichlet", "skew", "shards", "single-class", "natural", "centralised")

Held = Annotated[float, AtLeast(0), Below(1)]


@dataclass(frozen=True)
class DataOptions(Options, section="data"):
    """Where images come from and how they are read.

    Attributes:
        source: ``"digits"`` (scikit-learn's handwritten digits), ``"parquet"`` (Hugging Face image
            convention), ``"folder"`` (a folder for each class), ``"clients"`` (a folder for each client, with
            images or class folders inside), ``"images"`` (any folder of images, no labels), ``"hub"`` (a
            Hugging Face dataset) or ``"torchvision"`` (one of its datasets).
        path: File, folder, hub name or torchvision class; not read by ``"digits"``. A folder may hold the
            splits (``train.parquet``, ``train-00000-of-00002.parquet``, ``train/``). A relative path that is
            not here is looked for under the environment variable ``ATOLL_DATA``.
        hub_config: Configuration of a hub dataset that has several.
        train_split: Name of the training split.
        test_split: Name of the test split; by default ``test``, or ``val`` where there is no ``test``.
        test_fraction: Share held out for testing where the source has no test split: stratified, and the same
            whatever the recipe's seed. 0 holds out nothing.
        validation_fraction: Share of the training images set aside for tuning, stratified, drawn by the
            recipe's seed.
        limit: At most so many training images, drawn at random but the same whatever the seed; a smaller
            limit's images are among a larger one's.
        image_size: Side of the square images: the shorter side is resized to it and the centre cut out.
        channels: 3 (colour) or 1 (grey).
        image_column: Parquet and hub: the column of images; by default the first that holds images.
        label_column: Parquet and hub: the column of classes; by default ``label`` where there is one.
        natural_column: Parquet and hub: a text column to keep for the natural partition (integer columns
            always are).
        labels: Whether labels are read at all.
        on_corrupt: What an image that cannot be decoded is a reason for: to ``"refuse"`` the source, or to
            ``"skip"`` the image.
        window: How more than 8 bits become 8: ``"fixed"`` maps window_low..window_high to 0..255,
            ``"per-image"`` each image's own darkest and brightest value.
        window_low: The value that becomes black.
        window_high: The value that becomes white; 4095 for 12-bit scanners.
        memory_gib: A split that would be larger than this when decoded streams from its source instead of the
            cache.
    """

    source: Annotated[str, OneOf(SOURCES)] = "digits"
    path: str | None = None
    hub_config: str | None = None
    train_split: str = "train"
    test_split: str | None = None
    test_fraction: Held = 0.2
    validation_fraction: Held = 0.0
    limit: Count | None = None
    image_size: Count = 32
    channels: Literal[1, 3] = 3
    image_column: str | None = None
    label_column: str | None = None
    natural_column: str | None = None
    labels: bool = True
    on_corrupt: Literal["refuse", "skip"] = "refuse"
    window: Window = "fixed"
    window_low: float = 0.0
    window_high: float = 65535.0
    memory_gib: Positive = 8.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source != "digits" and not self.path:
            raise UserError(f"data.source = {self.source!r} needs data.path")
        if not self.window_low < self.window_high:
            raise UserError(
                f"data.window_low = {self.window_low} must be below data.window_high = {self.window_high}"
            )

    @property
    def decoding(self) -> Decoding:
        """What decides the pixels."""
        return Decoding(self.image_size, self.channels, self.window, self.window_low, self.window_high)

    @property
    def memory_bytes(self) -> int:
        """The memory budget."""
        return int(self.memory_gib * 2**30)


@dataclass(frozen=True)
class PartitionOptions(Options, section="partition"):
    """How the training images are split among clients: a recipe's ``[partition]`` section.

    Attributes:
        kind: ``"iid"`` (equal random parts), ``"dirichlet"`` (label proportions drawn from Dir(α)),
            ``"skew"`` (β-skewness), ``"shards"`` (a fixed number of classes at each client),
            ``"single-class"`` (one class, one client), ``"natural"`` (one client for each value of a column)
            or ``"centralised"`` (one client holds all).
        clients: The number of clients K; ``"natural"`` and ``"centralised"`` know theirs and do not read it.
        alpha: α of the Dirichlet distribution: small is skewed, large is near IID.
        variant: Whose Dirichlet split: ``"moon"`` (variant A: MOON, FedX, FedDecorr, FedQuad), ``"fedu2"``
            (B: FedU², SSD), ``"dec-ssl"`` (C: Dec-SSL) or ``"l-dawa"`` (D: L-DAWA, Orchestra). They give
            different client sizes.
        balanced: Orchestra's balancing, for the ``"l-dawa"`` variant: 100 Sinkhorn scalings even out the
            clients.
        beta: β of the skewness split: 1 is IID, 0 gives each client its own classes.
        classes_per_client: For ``"shards"``. Classes × clients equal to the number of classes gives FedCA's
            disjoint classes; more than that shares classes, as EasyFL does.
        clients_per_value: For ``"natural"``: each value's images are split at random among this many clients.
        min_size: The fewest images that a client may hold; by default 10 for ``"moon"`` and 1 otherwise.
        retries: How many Dirichlet draws may fail before giving up.
        column: The column to read in the labels' place: the clients of ``"natural"`` (by default ``client``,
            or the only column), or cluster ids for ``"dirichlet"``, ``"skew"``, ``"shards"`` and
            ``"single-class"``.
    """

    kind: Annotated[str, OneOf(KINDS)] = "dirichlet"
    clients: Count = 10
    alpha: Positive = 0.1
    variant: Annotated[str, OneOf(VARIANTS)] = "moon"
    balanced: bool = False
    beta: Annotated[float, AtLeast(0), AtMost(1)] = 0.0
    classes_per_client: Count = 2
    clients_per_value: Count = 1
    min_size: Annotated[int, AtLeast(1, "no client may be empty")] | None = None
    retries: Count = 1000
    column: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.balanced and self.variant != "l-dawa":
            raise UserError(
                f"partition.balanced belongs to variant 'l-dawa' and has no meaning for {self.variant!r}; "
                "set partition.variant = 'l-dawa' or partition.balanced = false"
            )

    @property
    def smallest_client(self) -> int:
        """The fewest images that a client may hold."""
        if self.min_size is not None:
            return self.min_size
        return VARIANTS[self.variant].min_size if self.kind == "dirichlet" else 1
