"""Fingerprints of a site's images, by which the site itself notices during a run that they have changed.

They stay at the site. The coordinator knows only the numbers and classes that the site reports.
"""

from __future__ import annotations

from pathlib import Path

from atoll.core.files import read_bytes, write_whole
from atoll.data.sources import Splits
from atoll.engines.flower.site_errors import SiteError

FILE = "images.txt"


def check_images(folder: Path, splits: Splits, begun: bool) -> None:
    """Refuse images other than those with which the site takes part in a run; before it does, keep what they are.

    Args:
        folder: Folder of the run at the site.
        splits: The site's images.
        begun: Whether a round has accepted an update of the site.

    Raises:
        SiteError: It was made from other images.
    """
    path, now = folder / FILE, _fingerprints(splits)
    before = read_bytes(path) if path.is_file() else None
    if begun and before not in (None, now):
        raise SiteError(
            "the site's images have changed since it began this run; restore them (the files, and data=… in "
            "--node-config), or start a new run"
        )
    if before != now:
        write_whole(path, now)


def _fingerprints(splits: Splits) -> bytes:
    parts = (splits.train, splits.test, splits.validation)
    return "".join(f"{'none' if images is None else images.fingerprint}\n" for images in parts).encode()
