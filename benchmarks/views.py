"""Views per second of Atoll, of torchvision's per-image transforms, and of kornia's batched ones if installed.

    python benchmarks/views.py --threads 2 --preset simclr

All make the same kind of view of the same photographs, in turns in one run, so that other load on the machine
affects them equally; the best of the repeats counts. One view of one image counts as one image.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable

import torch
from sklearn.datasets import load_sample_images
from torch import Tensor
from torchvision.transforms import v2

from atoll.data.views.views import PRESETS, ViewOptions, ViewSettings, make_views


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

    return K.AugmentationSequential(
        K.RandomResizedCrop((size, size), settings.crop_scale, settings.crop_ratio),
        K.RandomHorizontalFlip(p=settings.flip),
        K.ColorJitter(
            settings.brightness, settings.contrast, settings.saturation, settings.hue, p=settings.jitter
        ),
        K.RandomGrayscale(p=settings.grayscale),
        K.RandomGaussianBlur((kernel, kernel), settings.blur_sigma, p=settings.blur),
        K.Normalize(torch.tensor(settings.mean), torch.tensor(settings.std)),
    )


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
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
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


if __name__ == "__main__":
    main()
