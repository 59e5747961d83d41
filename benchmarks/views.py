"""Views per second of Atoll, of torchvision's per-image transforms, and of kornia's batched ones if installed.

    python benchmarks/views.py --threads 2 --preset simclr [--json FILE]

All make the same kind of view of the same photographs, in turns in one run, so that other load on the machine
affects them equally; the best of the repeats counts. One view of one image counts as one image. Last comes the
views' share of the training steps of the board's row of SimCLR, with one thread: of a client's round of eight
batches, the time in which only its batches are made.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch
from sklearn.datasets import load_sample_images
from torch import Tensor
from torchvision.transforms import v2

from atoll.commands.gpu_workloads import one_client_round, synthetic_workload
from atoll.core.allocator import keep_freed_memory
from atoll.data.views.views import PRESETS, ViewOptions, ViewSettings, make_views
from measured import write


def photographs(n: int, size: int) -> Tensor:
    """Make overlapping crops of two photographs, uint8 (n, 3, size, size)."""
    pictures = [torch.tensor(picture).permute(2, 0, 1) for picture in load_sample_images().images]
    crops = []
    for i in range(n):
        picture = pictures[i % 2]
        top = 37 * i % (picture.shape[1] - size)
        left = 61 * i % (picture.shape[2] - size)
        crops.append(picture[:, top : top + size, left : left + size])
    return torch.stack(crops)


def torchvision_transform(settings: ViewSettings, size: int, kernel: int, pillow: bool) -> v2.Transform:
    """The preset in torchvision, for one image."""
    jitter = v2.ColorJitter(settings.brightness, settings.contrast, settings.saturation, settings.hue)
    return v2.Compose(
        [
            v2.RandomResizedCrop(
                size,
                settings.crop_scale,
                settings.crop_ratio,
                v2.InterpolationMode(settings.interpolation),
                antialias=True,
            ),
            v2.RandomHorizontalFlip(settings.flip),
            v2.RandomApply([jitter], settings.jitter),
            v2.RandomGrayscale(settings.grayscale),
            v2.RandomApply([v2.GaussianBlur(kernel, settings.blur_sigma)], settings.blur),
            v2.PILToTensor() if pillow else v2.Identity(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(list(settings.mean), list(settings.std)),
        ]
    )


def kornia_transform(settings: ViewSettings, size: int, kernel: int) -> Callable[[Tensor], Tensor]:
    """The preset in kornia, for a batch."""
    import kornia.augmentation as K

    transform: Callable[[Tensor], Tensor] = K.AugmentationSequential(
        K.RandomResizedCrop((size, size), settings.crop_scale, settings.crop_ratio),
        K.RandomHorizontalFlip(p=settings.flip),
        K.ColorJitter(
            settings.brightness, settings.contrast, settings.saturation, settings.hue, p=settings.jitter
        ),
        K.RandomGrayscale(p=settings.grayscale),
        K.RandomGaussianBlur((kernel, kernel), settings.blur_sigma, p=settings.blur),
        K.Normalize(torch.tensor(settings.mean), torch.tensor(settings.std)),
    )
    return transform


def share_of_steps(repeats: int) -> dict[str, float]:
    """Seconds of a client's round with the board's recipe, and of its batches alone, by turns; medians."""
    torch.set_num_threads(1)
    work = synthetic_workload("board-short", ["method.name=fed_simclr"], torch.device("cpu"), batches=4)
    paths: dict[str, Callable[[], object]] = {
        "round": lambda: one_client_round(work),
        "batches": lambda: deque(work.batches(work.federation.recipe.train.epochs), maxlen=0),
    }
    seconds: dict[str, list[float]] = {name: [] for name in paths}
    for _ in range(repeats):
        for name, path in paths.items():
            start = time.perf_counter()
            path()
            seconds[name].append(time.perf_counter() - start)
    middle = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    return {**middle, "share": middle["batches"] / middle["round"]}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    with_crops = [
        name
        for name, preset in PRESETS.items()
        if preset.crop_scale and not (preset.pad_crop or preset.solarize)
    ]
    parser.add_argument("--preset", choices=with_crops, default="simclr")
    parser.add_argument("--size", type=int, default=32, help="side of the stored images and of the views")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument(
        "--per-image", type=int, default=256, help="number of images for the timing of per-image paths"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    keep_freed_memory()  # as every process that trains
    torch.manual_seed(0)
    images = photographs(options.batch, options.size)
    views = make_views(ViewOptions(options.preset), options.size, 3)
    generator = torch.Generator().manual_seed(0)
    few = images[: options.per_image]
    pictures = [v2.functional.to_pil_image(image) for image in few]
    on_tensors, on_pillow = (
        torchvision_transform(views.settings, options.size, views.blur_kernel, pillow)
        for pillow in (False, True)
    )
    paths: dict[str, tuple[int, Callable[[], object]]] = {
        "atoll, a batch": (len(images), lambda: views(images, generator)),
        "torchvision, tensors": (len(few), lambda: torch.stack([on_tensors(image) for image in few])),
        "torchvision, Pillow": (len(few), lambda: torch.stack([on_pillow(picture) for picture in pictures])),
    }
    if importlib.util.find_spec("kornia"):
        batched = kornia_transform(views.settings, options.size, views.blur_kernel)
        paths["kornia, a batch"] = (len(images), lambda: batched(images.float() / 255))

    best = dict.fromkeys(paths, float("inf"))
    for repeat in range(options.repeats + 1):
        for name, (count, path) in paths.items():
            start = time.perf_counter()
            path()
            if repeat > 0:  # the first is a warm-up
                best[name] = min(best[name], (time.perf_counter() - start) / count)

    print(
        f"preset {options.preset}, {options.size}×{options.size}, batches of {options.batch}, "
        f"{options.threads} thread(s), torch {torch.__version__}, best of {options.repeats}"
    )
    ours = best["atoll, a batch"]
    for name, seconds in best.items():
        print(f"{name:22s} {1 / seconds:9,.0f} images/s   atoll is {seconds / ours:5.1f} × as fast")
    share = share_of_steps(options.repeats)
    print(f"share of the steps of the board's SimCLR: {share['share']:.1%}")
    per_second = {name: round(1 / seconds) for name, seconds in best.items()}
    write(options.json, {"views_per_second": per_second, "steps": share})


if __name__ == "__main__":
    main()
