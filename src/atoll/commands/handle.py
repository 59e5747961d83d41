"""A run as an object in Python: its results as tables, its report, its encoder and its nearest images."""

from __future__ import annotations

from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from rich.console import Group
from rich.text import Text

from atoll.commands.embed import embed_given, embed_images
from atoll.commands.evaluate import evaluate_on
from atoll.commands.export import export_run
from atoll.commands.neighbours import search
from atoll.commands.report import check_page
from atoll.commands.run_files import find_one_encoder
from atoll.core import run_folder
from atoll.core.errors import UserError
from atoll.core.extras import require
from atoll.core.files import to_path
from atoll.core.given import value_of
from atoll.core.metrics_lines import numbers
from atoll.core.process_state import standard_settings
from atoll.core.tree import Tree
from atoll.data.items import to_image
from atoll.data.objects import give_data
from atoll.models import Encoder, load_encoder
from atoll.recipe.recipe import Recipe, recipe_of
from atoll.report import write_report
from atoll.report.comparison import comparison_cells, comparison_html, comparison_table
from atoll.report.html import join, tag
from atoll.report.neighbours import neighbours_table

if TYPE_CHECKING:
    import pandas


class Run(run_folder.Run):
    """A run: its folder, its results, its report and its encoder. A notebook shows it as a table.

    Args:
        folder: Path of the folder, which need not exist. The run keeps its place if the process changes its working
            folder.
        recipe: The run's recipe, including objects that Python code gave it; None to read it from the folder.

    Example:
        >>> import atoll
        >>> run = atoll.Run("runs/digits-ssd-seed0")
        >>> run.name, run.encoder_path.name, run.exists()
        ('digits-ssd-seed0', 'encoder.safetensors', False)
        >>> run
        Run('runs/digits-ssd-seed0'): no run in this folder
    """

    def __init__(self, folder: Path | str, recipe: Recipe | None = None) -> None:
        super().__init__(folder)
        self.folder = self.folder.absolute()
        self._recipe = recipe

    @property
    def recipe(self) -> Recipe:
        """The run's recipe.

        Raises:
            UserError: There is no run in the folder, or its recipe is damaged.
        """
        return self._recipe or recipe_of(self)

    def to_pandas(self) -> pandas.DataFrame:
        """Return the numbers of the metrics as a table: a row for each round, which is the index.

        Raises:
            UserError: pandas is not installed.
        """
        library = require("pandas", "pandas", "to_pandas")
        frame: pandas.DataFrame = library.DataFrame([numbers(line) for line in self.metrics])
        return frame.set_index("round") if len(frame) else frame

    def report(self, out: Path | str | None = None) -> Path:
        """Write the report of this run.

        Args:
            out: The page's file; None for ``report.html`` in the run's folder.

        Returns:
            The page's file.

        Raises:
            UserError: There is no run in the folder, or the page cannot be written.
        """
        if not out:
            return write_report([self.folder], self.folder / "report.html")
        page = to_path(out, "the report")
        check_page(page)
        return write_report([self.folder], page)

    def encoder(self) -> Encoder:
        """Load the finished encoder, in evaluation mode.

        Raises:
            UserError: The run has not finished, or the file is damaged.
        """
        return load_encoder(find_one_encoder(self.folder), value_of(self.recipe.model.encoder))

    def embed(self, images: object, device: str = "auto") -> NDArray[np.float32]:
        """Compute the representations of images with the finished encoder, as ``atoll embed`` does.

        Args:
            images: An image file, a folder (its images in the order of their sorted paths), an opened image, or
                images in the forms of `atoll.simulate`: an array, a dataset; labels are not read.
            device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``…, or ``"auto"`` (a GPU if there is one).

        Returns:
            The representations, (N, d).

        Raises:
            UserError: The run has not finished, an image is missing or cannot be decoded, or there is no such
                device.

        Example:
            >>> import tempfile
            >>> import atoll
            >>> import numpy as np
            >>> iid = {"kind": "iid", "clients": 2}
            >>> small = {"base": "digits", "data": {"limit": 100}, "partition": iid, "train": {"rounds": 0}}
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     run = atoll.simulate(small, out=folder)
            ...     h = run.embed(np.zeros((5, 8, 8), np.uint8))
            >>> h.shape
            (5, 128)
        """
        encoder = self.encoder()
        if isinstance(images, str | PathLike):
            return embed_images(encoder, Path(images), device=device)[1].numpy()
        given = [images] if isinstance(images, Image.Image) else images
        return embed_given(encoder, given, device).numpy()

    def evaluate(
        self, protocol: str, data: object = None, test_data: object = None, device: str | None = None
    ) -> dict[str, Any]:
        """Evaluate the finished encoder under a named protocol, as ``atoll evaluate`` does, and save the result.

        Args:
            protocol: Name of the protocol: ``"knn"``, ``"probe"``, ``"finetune-10"`` …
            data: Images on which kNN and probes are fitted, in the forms of `atoll.simulate`; None for the run's
                images. If Python code gave the run its images, and this object comes from the run's folder, give
                them again.
            test_data: The test images; None to hold out ``data.test_fraction`` of ``data``.
            device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``…, or ``"auto"`` (a GPU if there is one); None for the
                recipe's ``engine.device``.

        Returns:
            The protocol's numbers, as in `results`, and the ``"split"`` of the evaluation. For the test split of
            other images than the run's also their ``"fingerprints"``.

        Raises:
            UserError: The run has not finished, the protocol is unknown, the images lack labels or held-out images
                that it needs, or there is no such device.

        Example:
            >>> import tempfile
            >>> import atoll
            >>> iid = {"kind": "iid", "clients": 2}
            >>> small = {"base": "digits", "data": {"limit": 100}, "partition": iid, "train": {"rounds": 0}}
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     found = atoll.simulate(small, out=folder).evaluate("probe")
            >>> found["split"], 0 <= found["probe/accuracy"] <= 1
            ('test', True)
        """
        if not isinstance(protocol, str):
            raise UserError(f"evaluate takes the name of one protocol, such as 'knn', and not {protocol!r}")
        recipe, other = self.recipe, None
        if data is not None or test_data is not None:
            images = replace(recipe.data, source="object", path=give_data(data, test_data))
            if images == recipe.data:  # by their fingerprint
                recipe = replace(recipe, data=images)
            else:
                other = images
        return evaluate_on(self, protocol, other, recipe, device)

    @standard_settings()
    def export(self, format: str, output: Path | str | None = None) -> Path:
        """Export the finished encoder for other programs, as ``atoll export`` does.

        Args:
            format: ``"safetensors"``, ``"pt2"``, ``"onnx"``, ``"timm"`` or ``"huggingface"``.
            output: File or folder to write; None for ``encoder-export.FORMAT``, or ``encoder-export-FORMAT`` for a
                folder, in the run's folder.

        Returns:
            The file or folder.

        Raises:
            UserError: The run has not finished, the format is unknown or does not fit the encoder, or a library is
                missing.
        """
        return export_run(self.folder, format, Path(output) if output else None, self.encoder())

    def neighbours(
        self,
        image: Path | str | Image.Image | NDArray[np.uint8],
        k: int = 8,
        among: Path | str | None = None,
        device: str = "auto",
    ) -> Neighbours:
        """Find the training images whose representations are most similar to that of a given image.

        Args:
            image: An image file, an opened image, or its pixels, (H, W) or (H, W, C).
            k: Number of neighbours.
            among: A folder of images to search; None for the run's training images.
            device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``…, or ``"auto"`` (a GPU if there is one).

        Raises:
            UserError: The run has not finished, an image is missing or cannot be decoded, or there is no such
                device.

        Example:
            >>> import tempfile
            >>> import atoll
            >>> import numpy as np
            >>> iid = {"kind": "iid", "clients": 2}
            >>> small = {"base": "digits", "data": {"limit": 100}, "partition": iid, "train": {"rounds": 0}}
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     run = atoll.simulate(small, out=folder)
            ...     found = run.neighbours(np.zeros((8, 8), np.uint8), k=3)
            >>> len(found.names), found.similarity[0] >= found.similarity[2]
            (3, True)
        """
        asked = Path(image) if isinstance(image, str | Path) else to_image(image)
        within = None if among is None else to_path(among, "among")
        with standard_settings():
            record, *_ = search(self, asked, within, 1, k, self.encoder(), self.recipe, device)
        return Neighbours(record)

    def __fspath__(self) -> str:
        """Return the folder, so that a run can be given as a path."""
        return str(self.folder)

    def __repr__(self) -> str:
        here = Path.cwd()  # so that a shared notebook shows no home folder
        shown = self.folder.relative_to(here) if self.folder.is_relative_to(here) else self.folder
        return f"Run({str(shown)!r}): {self._state()}"

    def __rich__(self) -> Group:
        """Show the results as a table in a terminal."""
        heading = Text(repr(self))
        return Group(heading, comparison_table(comparison_cells([self]))) if self.exists() else Group(heading)

    def _repr_html_(self) -> str:
        heading = tag("p", repr(self))
        if not self.exists():
            return heading
        return join([heading, comparison_html(comparison_cells([self]))])

    def _state(self) -> str:
        if not self.exists():
            return "no run in this folder"
        rounds = recipe_of(self).train.rounds  # of the folder: the run may have been extended since
        done = max((line["round"] for line in self.metrics), default=0)
        state = "finished" if self.finished else "unfinished"
        if self.results.get("stopped_early"):
            state = "stopped early"
        return f"{self.recipe.label}, {state}, {done} of {rounds} rounds"


@dataclass(frozen=True)
class Neighbours:
    """The nearest images of one image, nearest first. A notebook shows them as pictures.

    Attributes:
        record: What was found, as `atoll.commands.neighbours.find_neighbours` returns it.
    """

    record: Tree

    @property
    def names(self) -> list[str]:
        """Names of the images: ``#ROW`` for a training image, otherwise a file."""
        names: list[str] = self.record["names"][0]
        return names

    @property
    def similarity(self) -> list[float]:
        """Cosine between their representations and that of the image."""
        similarity: list[float] = self.record["similarity"][0]
        return similarity

    @property
    def clients(self) -> list[str]:
        """The clients that hold them; empty if they are unknown."""
        clients: list[list[str]] = self.record["clients"]
        return clients[0] if clients else []

    def __repr__(self) -> str:
        owners = self.clients or [""] * len(self.names)
        rows = zip(self.names, owners, self.similarity, strict=True)
        return ", ".join(
            f"{name}{f' (client {owner})' if owner else ''}: {similar:.3f}" for name, owner, similar in rows
        )

    def _repr_html_(self) -> str:
        return neighbours_table(self.record, "Nearest neighbours")
