"""Encoders in the formats of other programs: torch.export's and ONNX's programs, and model folders.

A program's metadata hold what the format lacks: one JSON text under `KEY`, with the input's size, channels, mean
and std, the classes, and the origin of the encoder.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from atoll.core.errors import UserError
from atoll.core.extras import require
from atoll.core.text import first_line, short
from atoll.core.variables import environment_variables
from atoll.models.encoder import Encoder
from atoll.models.options import rebuild_encoder

KEY = "atoll"  # of the metadata in an ONNX program, and in the config.json of a model's folder
# Constants in a program of torch.export that torch reads by pickle, or that are objects of TorchScript.
OBJECT = re.compile(r"constants/(opaque|custom)_obj_")
EXTRA = "atoll.json"  # the file with the metadata in a program of torch.export
INPUT, OUTPUT = "images", "representations"  # names in a program
CONFIG, WEIGHTS = "config.json", "model.safetensors"  # of a model's folder


class ProgramEncoder(Encoder):
    """A program of another format as an encoder. It cannot be trained.

    Args:
        run: The program.
        metadata: Metadata from the program's file.
    """

    def __init__(self, run: Callable[[Tensor], Tensor], metadata: Mapping[str, Any]) -> None:
        super().__init__(dim=0)
        self._run = (run,)  # in a tuple, and so no submodule: an exported module cannot change its mode
        self.metadata = dict(metadata)
        size = self.metadata["image_size"]
        self.dim = self(torch.zeros(1, self.metadata["channels"], size, size)).shape[1]

    def forward(self, images: Tensor) -> Tensor:
        """Compute the representations of a batch of images."""
        return self._run[0](images)


def load_program(path: Path) -> Encoder:
    """Read a program that `atoll export` wrote as ``.pt2`` or ``.onnx``.

    Raises:
        UserError: The file is missing or damaged, has no metadata of Atoll's, or a library is missing.
    """
    if not path.is_file():
        raise UserError(f"there is no file {path}; check the path")
    read = _read_pt2 if path.suffix == ".pt2" else _read_onnx
    try:
        run, about = read(path)
    except UserError:
        raise
    except Exception as error:  # other libraries' readers may raise any exception
        raise UserError(f"{path} is damaged or no program ({first_line(error)}); export it again") from error
    if not about:
        raise UserError(
            f"{path} has no metadata of Atoll's, so the size and the normalisation of its images are unknown; "
            "export the encoder with this version of atoll"
        )
    return ProgramEncoder(run, json.loads(about))


def load_folder(folder: Path) -> Encoder:
    """Read a model's folder that `atoll export` wrote, for timm or Hugging Face, or the encoder in a run's folder.

    Raises:
        UserError: The folder holds no encoder of Atoll's, or it is damaged.
    """
    try:
        about = json.loads((folder / CONFIG).read_text())[KEY]
        state = safetensors.torch.load_file(folder / WEIGHTS)
        encoder = rebuild_encoder(about["spec"])
        encoder.load_library_state(state)
        encoder.metadata = dict(about["metadata"])
    except FileNotFoundError as error:
        raise UserError(
            f"{folder} is a folder without an encoder: there is no {Path(str(error.filename)).name} in it; name an "
            "encoder's file, the folder of a finished run, or one that atoll export wrote"
        ) from None
    except UserError:
        raise
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise UserError(
            f"{folder} is damaged, or not written by atoll export ({first_line(error)}); export it again"
        ) from error
    return encoder.eval()


def is_ours(folder: Path) -> bool:
    """Whether `atoll export` wrote a model's folder."""
    try:
        return KEY in json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError, TypeError):
        return False


def _read_pt2(path: Path) -> tuple[Callable[[Tensor], Tensor], str]:
    if not zipfile.is_zipfile(path):
        raise UserError(f"{path} is damaged or no program of torch.export; export it again")
    with zipfile.ZipFile(path) as archive:
        objects = [name for name in archive.namelist() if OBJECT.search(name)]
    if objects:
        raise UserError(
            f"{path} contains {short(objects[0])}, an object whose reading can run code; export it again"
        )
    extra = {EXTRA: ""}
    # With this variable, torch's reader unpickles only tensors, as weights and as constants.
    with environment_variables({"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1"}):
        module = torch.export.load(path, extra_files=extra).module()

    def run(images: Tensor) -> Tensor:
        output: Tensor = module(images)
        return output

    return run, extra[EXTRA]


def _read_onnx(path: Path) -> tuple[Callable[[Tensor], Tensor], str]:
    runtime = require("onnxruntime", "onnx", "an encoder in an ONNX file")
    session = runtime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])

    def run(images: Tensor) -> Tensor:
        (output,) = session.run([OUTPUT], {INPUT: images.detach().cpu().numpy()})
        return torch.from_numpy(output).to(images.device)

    return run, session.get_modelmeta().custom_metadata_map.get(KEY, "")
