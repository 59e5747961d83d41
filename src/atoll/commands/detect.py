"""``atoll detect``: fine-tunes an encoder for object detection and measures its average precision.

Each seed has three files in the results' folder, ``pretrained-seed0`` or ``scratch-seed0`` with these endings:

``.json``                    the record: average precision, losses, options, versions
``.safetensors``             the weights of the trained detector
``.checkpoint.safetensors``  the state from which an unfinished training continues
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torchvision.models.detection import FasterRCNN

from atoll.commands.run_files import find_one_encoder
from atoll.components.base import seeded
from atoll.core import tree
from atoll.core.config import build, describe, flatten, read_settings
from atoll.core.devices import find_device
from atoll.core.errors import RunError, UserError
from atoll.core.files import hash_bytes, read_bytes
from atoll.core.provenance import version
from atoll.core.rng import derive_seed
from atoll.core.run_folder import DETECTION, Run
from atoll.core.threads import threads
from atoll.data.detection.load import load_detection
from atoll.data.detection.objects import DetectionSet
from atoll.evaluation.detection.average_precision import (
    average_precision,
    detect_objects,
    require_pycocotools,
)
from atoll.evaluation.detection.network import make_detector
from atoll.evaluation.detection.options import DetectionOptions
from atoll.evaluation.detection.training import DetectorTraining
from atoll.models import Encoder, load_encoder
from atoll.models.options import rebuild_encoder

# Options that do not change a detector, but for rounding on another device.
MAY_CHANGE = ("options.device", "options.save_every")
# The training reads no test image; the fingerprint of its images covers the categories of both splits.
_NOT_TRAINED_ON = (*MAY_CHANGE, "images.test")


class Progress(Protocol):
    """Shows the progress of a training and its measurement."""

    def begin(self, title: str, done: int, total: int, unit: str) -> None:
        """Start a part of ``total`` steps or images (``unit``), of which ``done`` are done."""
        ...

    def advance(self, amount: int, facts: str = "") -> None:
        """Show that more of the part is done."""
        ...


@dataclass(frozen=True)
class DetectionJob:
    """An encoder, images and options that fit together; nothing is written yet.

    Attributes:
        encoder_path: The encoder's file.
        train: The training images.
        test: The test images.
        options: The options, with the first seed.
        scratch: Whether to start from new random weights.
        seeds: Number of seeds.
        out: Folder of the results.
        data: Name of the data.
    """

    encoder_path: Path
    train: DetectionSet
    test: DetectionSet
    options: DetectionOptions
    scratch: bool
    seeds: int
    out: Path
    data: str


def parse_options(settings: Sequence[str]) -> DetectionOptions:
    """Build the options of detection from ``KEY=value`` settings.

    Raises:
        UserError: A setting is unknown, of the wrong type or out of range.
    """
    return build(DetectionOptions, read_settings(settings))


def prepare_detection(
    run_or_encoder: Path,
    data: str,
    options: DetectionOptions,
    *,
    scratch: bool = False,
    seeds: int = 1,
    out: Path | None = None,
) -> DetectionJob:
    """Find the encoder, and read and decode the images and annotations, which finds most errors.

    Args:
        run_or_encoder: Folder of a finished run, or an encoder's file.
        data: Folder of annotated images.
        options: The options, with the first seed.
        scratch: Start from new random weights.
        seeds: Number of seeds.
        out: Folder of the results; None for ``detection/DATA`` in the run's folder or beside the encoder's file.

    Raises:
        UserError: pycocotools is missing, there is no encoder, it is no ResNet, or the data cannot be used.
    """
    require_pycocotools()
    if seeds < 1:
        raise UserError(f"--seeds is {seeds}; it must be at least 1")
    path = find_one_encoder(run_or_encoder)
    encoder = load_encoder(path)
    with torch.random.fork_rng(devices=[]):
        make_detector(encoder, 1, options)
    train, test = load_detection(data, options.train_split, options.test_split)
    if not train.with_objects():
        raise UserError(f"{train.name} holds only crowds, and no object to learn from; give annotated images")
    if options.masks:
        train.require_masks()
        test.require_masks(crowds=True)
    channels = int(encoder.spec["channels"])
    train.check_images(train.with_objects(), channels)
    test.check_images(range(len(test)), channels)
    name = Path(data).resolve().name + ("-masks" if options.masks else "")
    return DetectionJob(
        path, train, test, options, scratch, seeds, out or path.parent / DETECTION / name, name
    )


def detect(job: DetectionJob, progress: Progress | None = None) -> list[dict[str, Any]]:
    """Train and measure a detector for each seed; finished seeds are not repeated, unfinished ones continue.

    Args:
        job: What `prepare_detection` found.
        progress: Shows the progress.

    Returns:
        The record of each seed.

    Raises:
        UserError: The folder holds results of other options, images or weights.
        RunError: A training diverged.
    """
    with Run(job.out).locked(), threads(job.options.threads):
        seeds = range(job.options.seed, job.options.seed + job.seeds)
        return [
            _detect_seed(replace(job, options=replace(job.options, seed=seed)), progress) for seed in seeds
        ]


def _detect_seed(job: DetectionJob, progress: Progress | None) -> dict[str, Any]:
    start = "scratch" if job.scratch else "pretrained"
    folder, name = Run(job.out), f"{start}-seed{job.options.seed}"
    about = _about(job, start)
    if (record := folder.read_json(f"{name}.json")) is not None:
        _check_same(record, about, job.out / f"{name}.json")
        return dict(record)
    code = version()  # read before the training: the source files may change before it ends
    device = find_device(job.options.device, "device")
    encoder = _encoder(job)
    channels = int(encoder.spec["channels"])
    detector = _detector(job, encoder).to(device)
    training = DetectorTraining(detector, job.train, channels, job.options)
    seconds = _train(training, about, job.out / f"{name}.checkpoint.safetensors", name, progress)
    started = time.process_time()
    if progress:
        progress.begin(f"{name}: measuring", 0, len(job.test), "images")
    found = detect_objects(
        detector, job.test, channels, job.options.batch_size, progress.advance if progress else lambda _: None
    )
    record = {
        **about,
        "train_images": training.images,
        "test_images": len(job.test),
        "test_objects": len(job.test.annotations),
        "left_out": {"train": job.train.left_out, "test": job.test.left_out},
        "steps": training.steps,
        "losses": training.losses,
        **average_precision(job.test, found, job.options.masks),
        "cpu_seconds": round(seconds + time.process_time() - started, 1),
        "version": code,
    }
    tree.save(job.out / f"{name}.safetensors", tree.clone(detector.state_dict()))
    folder.write(f"{name}.json", json.dumps(record) + "\n")
    (job.out / f"{name}.checkpoint.safetensors").unlink(missing_ok=True)
    return record


def _about(job: DetectionJob, start: str) -> dict[str, Any]:
    """What a result depends on, as JSON values."""
    encoder = load_encoder(job.encoder_path)
    weights = {} if job.scratch else {"weights": hash_bytes(read_bytes(job.encoder_path))}
    return {
        "protocol": "detection",
        "start": start,
        "seed": job.options.seed,
        "data": job.data,
        "images": {"train": job.train.fingerprint(), "test": job.test.fingerprint()},
        "encoder": {**encoder.spec, **weights},
        "options": describe(job.options),
    }


def _check_same(
    before: dict[str, Any], now: dict[str, Any], path: Path, may_change: Sequence[str] = MAY_CHANGE
) -> None:
    """Check that earlier results are of the same options, images and weights, but for what may change."""
    old, new = flatten({key: before.get(key) for key in now}), flatten(now)
    changed = next(
        (key for key in sorted(old | new) if old.get(key) != new.get(key) and key not in may_change), None
    )
    if changed is not None:
        raise UserError(
            f"{path} was made with {changed} = {old.get(changed)!r}, and this is {new.get(changed)!r}; "
            "choose another --out, or delete that file"
        )


def _encoder(job: DetectionJob) -> Encoder:
    """The encoder, or a new one of its architecture."""
    encoder = load_encoder(job.encoder_path)
    if not job.scratch:
        return encoder
    seed = derive_seed(job.options.seed, "detection-encoder")
    made = seeded(seed, lambda: rebuild_encoder(encoder.spec))
    made.metadata = encoder.metadata
    return made


def _detector(job: DetectionJob, encoder: Encoder) -> FasterRCNN:
    """The detector; its new layers start alike for every encoder of one architecture."""
    seed = derive_seed(job.options.seed, "detection-network")
    return seeded(seed, lambda: make_detector(encoder, len(job.train.classes), job.options))


def _train(
    training: DetectorTraining, about: dict[str, Any], path: Path, name: str, progress: Progress | None
) -> float:
    """Train from the checkpoint, if there is one, to the end; return the CPU seconds of all processes so far."""
    earlier = 0.0
    if path.is_file():
        try:
            saved = tree.load(path)
        except UserError as error:
            raise UserError(f"{error}; delete it, and the training of this seed begins again") from None
        _check_same(saved["about"], about, path, _NOT_TRAINED_ON)
        training.load(saved["training"])
        earlier = saved["cpu_seconds"]
    started = time.process_time()
    if progress:
        progress.begin(name, training.step, training.steps, "steps")

    def after_step(training: DetectorTraining) -> None:
        if progress:
            # The loss of the step before: reading this step's would make the host wait for the GPU.
            progress.advance(1, f"loss {training.losses[-1]['loss']:.3f}" if training.losses else "")
        if training.step % training.options.save_every == 0 or training.step == training.steps:
            seconds = earlier + time.process_time() - started
            tree.save(path, {"about": about, "training": training.state(), "cpu_seconds": seconds})

    try:
        training.run(after_step)
    except RunError:
        # It would diverge again, and other options are refused beside its checkpoint.
        path.unlink(missing_ok=True)
        raise
    return float(earlier + time.process_time() - started)
