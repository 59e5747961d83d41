"""Folders of image files: by class, by client, or plain.

Files are sorted by name, so the order does not depend on the file system. Hidden files and files whose name has no
image suffix are ignored; links to folders are followed, as torchvision's ``ImageFolder`` does.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from atoll.core.errors import UserError, warn
from atoll.core.text import few
from atoll.data.options import DataOptions, find_test, held_out_names
from atoll.data.records import FileRecords, Listing, encode

IMAGE_SUFFIXES = {
    *(".png", ".jpg", ".jpeg", ".jpe", ".bmp", ".tif", ".tiff", ".webp", ".gif"),
    *(".pgm", ".ppm", ".pbm", ".pnm", ".jp2", ".dcm", ".dicom", ".npy"),
}
# What folders of splits are called elsewhere.
_TRAINING = {"train", "training"}
SPLITS = _TRAINING | {"test", "testing", "val", "valid", "validation"}
# What a folder is read as, and where it lies below that of a split, if there is one.
_LAYOUTS = {
    "folder": ("as classes", "CLASS/IMAGE"),
    "clients": ("as clients", "CLIENT/CLASS/IMAGE"),
    "images": ("without a split", "IMAGE"),
}


def read_class_folders(options: DataOptions, root: Path) -> tuple[Listing, Listing | None]:
    """Read ``root/class/image``, or ``root/train/class/image`` and the same below ``root/test``."""
    _tell_skipped(root)
    train, test = _splits(root, options)
    return _by_class(train), None if test is None else _by_class(test)


def read_client_folders(options: DataOptions, root: Path) -> tuple[Listing, Listing | None]:
    """Read ``root/client/image`` or ``root/client/class/image``, also in splits ``train`` and ``test``."""
    _tell_skipped(root)
    train, test = _splits(root, options)
    clients = _by_client(train, options.labels)
    if len(names := clients.column_values["client"]) == 1:
        warn(
            f"{train} holds one folder, {names[0]!r}, so there is one client; if the folders in it are clients, "
            f"set data.path to {train / names[0]}"
        )
    return clients, None if test is None else _by_client(test, options.labels)


def read_plain_folder(options: DataOptions, root: Path) -> tuple[Listing, Listing | None]:
    """Read any images below ``root``, or below ``root/train`` and ``root/test``, without labels."""
    _tell_skipped(root)
    train, test = _splits(root, options, nested=False)
    return _plain(train), None if test is None else _plain(test)


def _splits(root: Path, options: DataOptions, nested: bool = True) -> tuple[Path, Path | None]:
    """Find the folders of the splits; `root` itself if it has no splits.

    A class may be named "train", so with `nested` a split must be a folder of folders.
    """

    def is_split(folder: Path) -> bool:
        return folder.is_dir() and (not nested or bool(_folders(folder)))

    for name in (options.train_split, *held_out_names(options.test_split)):
        if (root / name).is_dir() and not any(is_image(path.name) for path in files_below(root / name)):
            raise UserError(f"the folder {root / name} holds no images; fill or remove it")
    if not is_split(root / options.train_split):
        if options.test_split is not None or options.train_split != DataOptions.train_split:
            kind = "folder of folders" if nested else "folder"
            raise UserError(
                f"{root} holds no {kind} {options.train_split!r} for the training split, but "
                f"{_list_folders(root)}; set data.train_split"
            )
        _tell_unknown(root, options)
        return root, None
    test = find_test(root, options, "folder", lambda name: root / name if is_split(root / name) else None)
    if test is None:
        _tell_unread(root, options.train_split)
    return root / options.train_split, test


def _tell_unknown(root: Path, options: DataOptions) -> None:
    """Warn of folders that are read like all others, though they have the names of splits."""
    names: dict[Path, set[str]] = defaultdict(set)  # of the folders in each folder
    for folder in {path.parent for path in files_below(root) if is_image(path.name)} - {root}:
        for inner in (folder, *folder.parents):
            names[inner.parent].add(inner.name)
            if inner.parent == root:
                break
    meaning, layout = _LAYOUTS[options.source]
    nested = {name for name in names[root] if options.source == "images" or root / name in names}
    splits = _like_splits(nested)
    if splits and options.train_split not in names[root]:
        warn(
            f"{root} holds no folder {options.train_split!r}, so {few(map(repr, splits))} are read {meaning}; if "
            "they are splits, call them 'train' and 'test', or set data.train_split and data.test_split to these"
        )
        return
    # One such name may be that of a class, such as a train.
    places = [place for place, beside in sorted(names.items()) if _are_splits(beside)]
    if places:
        splits = _like_splits(names[places[0]])
        also = f" (as do {len(places) - 1} other folders)" if len(places) > 1 else ""
        plain = "; if there are no classes, set data.source = 'images'" if options.source == "folder" else ""
        warn(
            f"{places[0]} holds folders called {few(map(repr, splits))}{also}, whose images are all read as "
            f"training images; if they are splits, lay the images out as train/{layout} and test/{layout} in "
            f"{root}{plain}"
        )


def _like_splits(names: Iterable[str]) -> list[str]:
    """Those names that folders of splits have elsewhere."""
    return sorted(name for name in names if name.lower() in SPLITS)


def _are_splits(names: Iterable[str]) -> bool:
    """Whether names of a training split and of another one are among them."""
    found = {name.lower() for name in _like_splits(names)}
    return bool(found & _TRAINING) and not found <= _TRAINING


def _tell_unread(root: Path, split: str) -> None:
    """Warn of folders with images next to the only split, which may in fact be a class of that name."""
    unread = [folder.name for folder in _folders(root) if folder.name != split and _images(folder, root)]
    if unread:
        warn(
            f"{root}: {split!r} is read as the training split, and {few(unread)} not at all; if one of them holds "
            f"the test images, set data.test_split, and if {split!r} is a class, rename it"
        )


def _list_folders(root: Path) -> str:
    """Names of the folders in `root`, for an error message."""
    found = [repr(folder.name) for folder in _folders(root)]
    return few(found, 5) or "no folders at all"


def _by_class(folder: Path) -> Listing:
    names: list[str] = []
    labels: list[str] = []
    class_folders = _folders(
        folder, f"{folder} holds no class folders; use data.source = 'images' for plain folders"
    )
    _refuse_loose(folder, "class")
    for class_folder in class_folders:
        files = _images_of("class", class_folder, folder)
        names += files
        labels += [class_folder.name] * len(files)
    codes, classes = encode(labels)
    return Listing(FileRecords(folder, tuple(names)), codes, classes)


def _by_client(folder: Path, labelled: bool) -> Listing:
    names: list[str] = []
    owners: list[str] = []
    labels: list[str] = []
    client_folders = _folders(folder, f"{folder} holds no client folders")
    _refuse_loose(folder, "client")
    for client in client_folders:
        files = _images_of("client", client, folder)
        names += files
        owners += [client.name] * len(files)
        labels += [name.split("/")[1] for name in files if name.count("/") > 1]
    if labelled and labels and len(labels) < len(names):
        loose = next(name for name in names if name.count("/") == 1)
        raise UserError(
            f"{folder}: some images are in class folders and others, such as {loose}, are not; "
            "sort all of them into classes or set data.labels = false"
        )
    clients, client_names = encode(owners)
    codes, classes = encode(labels) if labelled and labels else (None, [])
    return Listing(
        FileRecords(folder, tuple(names)), codes, classes, {"client": clients}, {"client": client_names}
    )


def _plain(folder: Path) -> Listing:
    names = _images(folder, folder)
    if not names:
        raise UserError(f"{folder} holds no images ({', '.join(sorted(IMAGE_SUFFIXES))})")
    return Listing(FileRecords(folder, tuple(names)))


def _folders(folder: Path, otherwise: str | None = None) -> list[Path]:
    """Folders in a folder, sorted by name; if there are none, raise `otherwise` as the error message."""
    entries = sorted(entry for entry in folder.iterdir() if entry.is_dir())
    found = [entry for entry in entries if not entry.name.startswith(".")]
    if otherwise is None:
        return found
    if not found:
        raise UserError(otherwise)
    hidden = [entry.name for entry in entries if entry.name.startswith(".") and _images(entry, folder)]
    if hidden:
        warn(f"{folder}: skipped hidden folders that hold images: {few(hidden)}; to read one, rename it")
    return found


def _images_of(kind: str, folder: Path, root: Path) -> list[str]:
    """Image files of a class or client; an empty folder is refused."""
    if files := _images(folder, root):
        return files
    raise UserError(f"the {kind} folder {folder} holds no images; fill or remove it")


def _images(folder: Path, root: Path) -> list[str]:
    """Image files at any depth, as sorted POSIX paths relative to `root`."""
    return sorted(path.relative_to(root).as_posix() for path in files_below(folder) if is_image(path.name))


def _tell_skipped(root: Path) -> None:
    """Warn of the files below a folder that are not read, because their names have no image suffix."""
    skipped = (path for path in files_below(root) if not is_image(path.name))
    suffixes = Counter(path.suffix.lower() or "without a suffix" for path in skipped)
    if suffixes:
        counts = ", ".join(f"{count} {suffix}" for suffix, count in suffixes.most_common(5))
        warn(f"{root}: skipped files without an image suffix: {counts}")


def files_below(folder: Path, above: frozenset[Path] | None = None) -> Iterator[Path]:
    """Files at any depth, without hidden files and folders; links to folders are followed, but not back up.

    Args:
        folder: The folder.
        above: The folders that led to it, with links resolved; by default those that contain it.

    Raises:
        UserError: A folder cannot be read.
    """
    here = folder.resolve()
    above = frozenset(here.parents) if above is None else above
    if here in above:
        return
    _, folders, files = next(os.walk(folder, onerror=_unreadable))
    yield from (folder / name for name in files if not name.startswith("."))
    for name in folders:
        if not name.startswith("."):
            yield from files_below(folder / name, above | {here})


def _unreadable(error: OSError) -> None:
    raise UserError(f"cannot read {error.filename}: {error.strerror or error}") from error


def is_image(name: str) -> bool:
    """Whether a file name has an image suffix and is not hidden."""
    return not name.startswith(".") and Path(name).suffix.lower() in IMAGE_SUFFIXES


def _refuse_loose(folder: Path, kind: str) -> None:
    """Refuse images next to the folders of classes or clients, which would otherwise be ignored silently."""
    loose = sorted(entry for entry in folder.iterdir() if entry.is_file() and is_image(entry.name))
    if loose:
        raise UserError(
            f"{loose[0]} is next to the {kind} folders and in none of them ({len(loose)} such images); "
            f"sort them into {kind} folders, or move them elsewhere"
        )
