"""The recipe's ``[data]`` and ``[partition]`` sections."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Annotated, Literal, TypeVar

from atoll.core.config import Options
from atoll.core.errors import UserError
from atoll.core.given import PREFIX
from atoll.core.schema import Above, AtLeast, AtMost, Below, Count, ImageSize, OneOf, OneOfOr, Positive
from atoll.data.decode import Decoding, Window
from atoll.data.partition.dirichlet import VARIANTS

SOURCES = (
    *("digits", "parquet", "csv", "folder", "clients", "images", "hub", "torchvision"),
    *("tar", "object", "synthetic"),
)
WITHOUT_PATH = ("digits", "synthetic")
KINDS = ("iid", "quantity", "dirichlet", "skew", "shards", "single-class", "natural", "centralised")
OWN = '"module:attribute", a dataset of your code, or a function that returns one'
CLIENT = "client"  # the column of clients, unless the recipe names another
BY_CLASS = ("dirichlet", "skew", "shards", "single-class")  # kinds that split classes, or clusters

Held = Annotated[float, AtLeast(0), Below(1)]
Found = TypeVar("Found")


def is_own_data(source: str) -> bool:
    """Whether a source's name is ``module:attribute``, so that reading it imports a user's module."""
    return ":" in source


def held_out_names(test_split: str | None) -> tuple[str, ...]:
    """Names that the test split may have, the first that exists: that of ``data.test_split``, or the usual ones."""
    return ("test", "val") if test_split is None else (test_split,)


def find_test(
    root: Path, options: DataOptions, kind: str, find: Callable[[str], Found | None]
) -> Found | None:
    """Find the test split in a folder by the names that it may have; None if ``find`` finds none.

    Raises:
        UserError: There is no such ``kind`` of the split that ``data.test_split`` names.
    """
    test = next((found for name in held_out_names(options.test_split) if (found := find(name))), None)
    if test is None and options.test_split is not None:
        raise UserError(f"{root} holds no {kind} of the split {options.test_split!r}; set data.test_split")
    return test


def refuse_test_split(file: Path, test_split: str | None) -> None:
    """Refuse ``data.test_split`` for a source that is one file, with training images only.

    Raises:
        UserError: It is set.
    """
    if test_split is not None:
        raise UserError(f"{file} is one file and holds no split {test_split!r}; give the folder in data.path")


@dataclass(frozen=True)
class DataOptions(Options, section="data"):
    """The recipe's ``[data]`` section: the source of the images, and how they are read.

    Attributes:
        source: ``"digits"`` (scikit-learn's handwritten digits), ``"parquet"`` (Hugging Face image
            convention), ``"csv"`` (image files that a CSV file lists), ``"folder"`` (a folder for each class),
            ``"clients"`` (a folder for each client, with images or class folders inside), ``"images"`` (any folder
            of images, no labels), ``"hub"`` (a Hugging Face dataset), ``"torchvision"`` (a dataset of torchvision),
            ``"tar"`` (WebDataset's shards), ``"object"`` (images given in Python as ``data=``), ``"synthetic"``
            (``limit`` synthetic images of ten classes, to measure speed, not to learn from), or
            ``"module:attribute"``, a dataset of your code, or a function that returns one.
        path: File, folder, name of a hub dataset, torchvision class, or name of an object; not read by
            ``"digits"``, ``"synthetic"`` and a dataset of your code. A folder may hold the splits
            (``train.parquet``, ``train-00000-of-00002.parquet``, ``train/``). A relative path that does not exist
            is searched for under the environment variable ``ATOLL_DATA``.
        hub_config: Configuration of a hub dataset that has several.
        train_split: Name of the training split.
        test_split: Name of the test split; by default ``test``, or ``val`` if there is no ``test``. A dataset of
            your code has splits only if this is set: it is then a dict from their names to the images.
        test_fraction: Share held out for testing if the source has no test split: stratified, and independent of
            the recipe's seed. 0 holds out nothing.
        validation_fraction: Share of the training images set aside for tuning: stratified, and drawn with the
            recipe's seed.
        limit: Maximum number of training images. They are drawn at random, independently of the recipe's seed; a
            larger limit includes the images of a smaller one.
        image_size: Side of the square images in pixels: the shorter side is resized to it, and the centre is
            cropped.
        channels: 3 (colour), 1 (grey), or the number of channels of TIFF files or of arrays (``.npy`` files, or
            given in Python).
        image_column: Parquet and hub: the column of images; by default the first that holds images. CSV: the column
            of the image files' names; by default the first whose first value is a file.
        label_column: Parquet, CSV and hub: the column of classes; by default ``label`` if there is one. Tar: the
            key in ``KEY.json``.
        natural_column: Parquet, CSV and hub: a text column to read for the natural partition (integer columns, and
            a column ``client``, are always read). Tar: a key in ``KEY.json``.
        labels: Whether labels are read.
        on_corrupt: If an image cannot be decoded, ``"refuse"`` the source or ``"skip"`` the image.
        window: Conversion of more than 8 bits to 8: ``"fixed"`` maps window_low..window_high to 0..255,
            ``"per-image"`` maps the range of each image.
        window_low: The value that is mapped to black.
        window_high: The value that is mapped to white; 4095 for 12-bit scanners.
        memory_gib: Memory limit in GiB. A split whose decoded images exceed it is not cached, but streamed from its
            source.
    """

    source: Annotated[str, OneOfOr(SOURCES, OWN)] = "digits"
    path: str | None = None
    hub_config: str | None = None
    train_split: str = "train"
    test_split: str | None = None
    test_fraction: Held = 0.2
    validation_fraction: Held = 0.0
    limit: Count | None = None
    image_size: ImageSize = 32
    channels: Annotated[int, Above(0), AtMost(1024)] = 3
    image_column: str | None = None
    label_column: str | None = None
    natural_column: str | None = None
    labels: bool = True
    on_corrupt: Literal["refuse", "skip"] = "refuse"
    window: Window = "fixed"
    window_low: float = 0.0
    window_high: float = 65535.0
    memory_gib: Annotated[float, Above(0), AtMost(2.0**20)] = 8.0

    @property
    def short_name(self) -> str:
        """Last part of the path, or the source: for names of files."""
        return Path(self.path).absolute().name.removeprefix(PREFIX) if self.path else self.source

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.path or self.source in WITHOUT_PATH or is_own_data(self.source)):
            raise UserError(f"data.source = {self.source!r} needs data.path; set it")
        for name in ("train_split", "test_split"):
            split = getattr(self, name)
            if split and (PurePath(split).is_absolute() or ".." in PurePath(split).parts):
                raise UserError(f"data.{name} = {split!r} leads out of data.path; set a name in it")
        if self.test_split == self.train_split:
            raise UserError(
                f"data.test_split = {self.test_split!r} is the training split; set another, or leave it out"
            )
        if not self.window_low < self.window_high:
            raise UserError(
                f"data.window_low = {self.window_low} must be below data.window_high = {self.window_high}"
            )

    @property
    def decoding(self) -> Decoding:
        """The options that determine the pixels."""
        return Decoding(self.image_size, self.channels, self.window, self.window_low, self.window_high)

    @property
    def memory_bytes(self) -> int:
        """The memory limit in bytes."""
        return int(self.memory_gib * 2**30)


@dataclass(frozen=True)
class PartitionOptions(Options, section="partition"):
    """The recipe's ``[partition]`` section: how the training images are split among clients.

    Attributes:
        kind: ``"iid"`` (equal random parts), ``"quantity"`` (random parts, sizes drawn from Dir(α)),
            ``"dirichlet"`` (label proportions drawn from Dir(α)), ``"skew"`` (β-skewness),
            ``"shards"`` (a fixed number of classes at each client),
            ``"single-class"`` (one client for each class), ``"natural"`` (one client for each value of a column, or
            for each folder of ``data.source = "clients"``, for which it is the default) or ``"centralised"`` (one
            client holds all).
        clients: Number of clients K; ``"natural"`` and ``"centralised"`` determine it themselves and ignore this
            option.
        alpha: α of the Dirichlet distribution. A small α gives skewed parts, a large one nearly IID parts.
        variant: Variant of the Dirichlet split: ``"moon"`` (A: MOON, FedX, FedDecorr, FedQuad), ``"fedu2"``
            (B: FedU², SSD), ``"dec-ssl"`` (C: Dec-SSL) or ``"l-dawa"`` (D: L-DAWA, Orchestra). They give
            different client sizes.
        balanced: Orchestra's balancing, for the ``"l-dawa"`` variant: 100 Sinkhorn scalings balance the clients'
            sizes.
        beta: β of the skewness split: 1 is IID; with 0, the images are sorted by class and cut into equal parts.
        classes_per_client: For ``"shards"``: number of classes of each client. If its product with the number of
            clients equals the number of classes, classes are disjoint (FedCA); if it is larger, clients share
            classes (EasyFL).
        clients_per_value: For ``"natural"``: each value's images are split at random among this many clients.
        min_size: Minimum number of images of a client; by default 10 for ``"moon"`` and 1 otherwise.
        sit_out_below: Clients with fewer images than this take no part; they are named in a warning, in
            ``partition.json`` and in the report. By default, no client sits out, and a client that is too small to
            train is an error.
        retries: Maximum number of Dirichlet draws.
        column: Column to read instead of the labels: the clients of ``"natural"`` (by default ``client``,
            or the only column beside those of images, labels and splits), or cluster ids for ``"dirichlet"``,
            ``"skew"``, ``"shards"`` and ``"single-class"``.
        features: Split clusters of features instead of labels (Dec-SSL). The features are those of a run's folder
            or of an encoder's file, or with ``"untrained"`` those of the run's encoder before training. They are
            reduced by PCA, whitened, and clustered by k-means.
        feature_clusters: Number of clusters; by default the number of clients.
        feature_dims: Number of principal components.
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
    sit_out_below: Annotated[int, AtLeast(2, "a client needs two images to train")] | None = None
    retries: Count = 1000
    column: str | None = None
    features: str | None = None
    feature_clusters: Count | None = None
    feature_dims: Count = 30

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.features and self.kind not in (*BY_CLASS, "centralised"):
            raise UserError(
                f"partition.kind = {self.kind!r} does not split clusters of partition.features; choose a kind from "
                f"{', '.join(BY_CLASS)}, or remove features"
            )
        if self.features and self.column:
            raise UserError("partition.features and partition.column both replace the labels; remove one")
        if self.balanced and self.variant != "l-dawa":
            raise UserError(
                f"partition.balanced applies to variant 'l-dawa' only, and partition.variant is {self.variant!r}; "
                "set partition.variant = 'l-dawa' or partition.balanced = false"
            )

    def client_column(self, columns: Collection[str], unread: Collection[str] = ()) -> str | None:
        """The column that determines the clients, or replaces the labels; None if there is none to choose.

        Args:
            columns: Names of the columns that were read.
            unread: Names of others that may hold the clients.
        """
        if self.column is not None or self.kind != "natural":
            return self.column
        if CLIENT in columns:
            return CLIENT
        return next(iter(columns)) if len(columns) == 1 and not unread else None

    @property
    def smallest_client(self) -> int:
        """Minimum number of images of a client."""
        if self.min_size is not None:
            return self.min_size
        return VARIANTS[self.variant].min_size if self.kind == "dirichlet" else 1
