"""Encoder files: one safetensors file with weights and architecture; equal weights give equal bytes."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from atoll.core.digests import DIGITS, MISMATCH, DamagedError, seal_at, verify_at
from atoll.core.environment import other_code
from atoll.core.errors import UserError, warn
from atoll.core.files import to_path, write_whole
from atoll.core.given import Given
from atoll.core.process_state import settings_kept
from atoll.core.tensor_file import serialise
from atoll.core.text import first_line
from atoll.core.tree import FILE_KEY
from atoll.models.encoder import Encoder, graft
from atoll.models.exported import load_folder, load_program
from atoll.models.external import Factory, is_external
from atoll.models.libraries import MissingEncoderError
from atoll.models.options import rebuild_encoder

LIBRARY = "library"  # in the description of a file whose weights have the names of the encoder's library
FORMAT = 2  # 1, of Atoll 0.1, has no digest
_MARKER = b'{"__metadata__":{"atoll":"{\\"digest\\": \\"'  # precedes the digest in an encoder's file
REMAKE = "delete it and resume its run, which writes it again"
_REMEDY = "name an encoder's file, such as encoder.safetensors in a finished run's folder"


def save_encoder(path: str | os.PathLike[str], encoder: Encoder, metadata: dict[str, Any]) -> None:
    """Write an encoder to a safetensors file, atomically.

    Equal weights and metadata give equal bytes, in any process.

    Args:
        path: The file to write or replace.
        encoder: The encoder, on any device.
        metadata: JSON values to save with the weights, such as the normalisation of the inputs.

    Raises:
        UserError: The file cannot be written; an existing file stays unchanged.

    Example:
        >>> from atoll.models import ModelOptions, build_encoder, load_encoder, save_encoder
        >>> encoder = build_encoder(ModelOptions(encoder="resnet-narrow"), channels=1, image_size=8)
        >>> save_encoder("encoder.safetensors", encoder, {"mean": [0.5]})
        >>> load_encoder("encoder.safetensors").metadata
        {'mean': [0.5]}
    """
    if not encoder.spec:
        raise UserError("an encoder can be read back only if build_encoder made it; this one has no spec")
    about = {"spec": encoder.spec, "metadata": metadata}
    write_whole(Path(path), _bytes(encoder.state_dict(), about))


def library_bytes(encoder: Encoder) -> bytes:
    """Make a safetensors file with the tensor names of the encoder's library; `load_encoder` reads it as well."""
    about = {"spec": encoder.spec, "metadata": encoder.metadata, "names": LIBRARY}
    return b"".join(_bytes(encoder.library_state(), about))


def _bytes(state: Mapping[str, Tensor], about: Mapping[str, Any]) -> list[bytes | memoryview]:
    described = {"digest": "0" * DIGITS, "format": FORMAT, **about}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in sorted(state.items())}
    # safetensors stores its metadata in a hash map of random order, so all metadata uses a single key.
    return seal_at(serialise(tensors, {"atoll": json.dumps(described, sort_keys=True)}), _MARKER)


def encoder_file(path: Path) -> Path:
    """The file of an encoder: that of a run's folder, or the given file itself."""
    return path / "encoder.safetensors" if path.is_dir() else path


@settings_kept()
def load_encoder(path: str | os.PathLike[str], encoder: nn.Module | Factory | None = None) -> Encoder:
    """Read an encoder that a run or `atoll export` wrote.

    Args:
        path: The encoder's file, a run's folder, or an export of ``atoll export``: a file (``.safetensors``,
            ``.pt2``, ``.onnx``) or a folder for timm or Hugging Face. An encoder from ``.pt2`` or ``.onnx`` cannot
            be trained.
        encoder: The module, or the function or class that makes it; needed if the run got its encoder as an object,
            or if the encoder's code is not on Python's path.

    Returns:
        The encoder in evaluation mode, with the saved metadata as its attribute ``metadata``.

    Raises:
        UserError: There is no such file, it is damaged, or it is not Atoll's.

    Example:
        >>> import torch
        >>> import atoll
        >>> from atoll.models import ModelOptions, build_encoder, save_encoder
        >>> made = build_encoder(ModelOptions(encoder="resnet-narrow"), channels=1, image_size=8)
        >>> save_encoder("encoder.safetensors", made, {})
        >>> atoll.load_encoder("encoder.safetensors")(torch.zeros(4, 1, 8, 8)).shape
        torch.Size([4, 128])
    """
    torch.set_default_dtype(torch.float32)  # the files' own, whatever the caller's is
    path = to_path(path, "the encoder's file")
    if path.suffix in (".pt2", ".onnx"):
        return load_program(path)
    if path.is_dir() and not encoder_file(path).is_file():
        return load_folder(path)
    path = encoder_file(path)
    tensors, about = _read_safetensors(path)
    if about is None:
        raise UserError(
            f"{path} holds weights without the description of an encoder, such as the files of other libraries or "
            f"of an export, so atoll cannot rebuild the encoder; {_REMEDY}, or load them into an encoder with "
            "load_weights (in a recipe: train.start)"
        )
    if "format" not in about:  # `atoll.core.tree` stores its trees under the same key
        raise UserError(f"{path} holds the state of a run, such as a checkpoint, and no encoder; {_REMEDY}")
    if about["format"] not in (1, FORMAT):
        raise UserError(
            f"{path} has format {about['format']}, and this version of atoll reads up to {FORMAT}; upgrade"
        )
    # Building draws random weights, which loading replaces; it must not advance the caller's generator.
    name = ""
    with torch.random.fork_rng(devices=[]):
        try:
            name = str(about["spec"]["encoder"])
            made = rebuild_encoder(about["spec"], None if encoder is None else Given(name, encoder))
            changed = other_code(about["spec"].get("code", {}), made.spec.get("code", {}))
            if about.get("names") == LIBRARY:
                made.load_library_state(tensors)
            else:
                made.load_state_dict(tensors)
            made.metadata = dict(about["metadata"])
        except MissingEncoderError as error:
            raise MissingEncoderError(f"{path}: {error}") from None
        except (AttributeError, KeyError, TypeError, RuntimeError, ValueError) as error:
            # PyTorch's first line only announces what does not fit.
            reason = first_line(RuntimeError(str(error).partition("\n")[2] or str(error)))
            if is_external(name):
                raise UserError(
                    f"{path} holds weights that do not fit {name!r} as its code is here ({reason}); restore the "
                    "code, or the version of the library, with which they were saved"
                ) from error
            raise UserError(
                f"{path} is damaged: its description does not fit its weights ({reason}); save the encoder again"
            ) from error
    if changed:
        warn(
            f"{path} was saved with another version of {changed} than its code is here, so its representations may "
            "differ; restore that code, or train again"
        )
    return made.eval()


def load_weights(encoder: Encoder, path: str | os.PathLike[str]) -> str:
    """Initialise an encoder, in place, from a file of weights: Atoll's, torchvision's, or any safetensors file.

    A tensor is copied if its name and shape match: a ResNet with the CIFAR stem takes all of torchvision's
    tensors except the first convolution.

    Args:
        encoder: The encoder to initialise.
        path: A safetensors file, or a state dict saved with torch.save.

    Returns:
        One sentence: how many tensors were copied, and which did not match.

    Raises:
        UserError: The file is missing, damaged or pickled, or no tensor in it matches.

    Example:
        >>> from atoll.models import ModelOptions, build_encoder, load_weights, save_encoder
        >>> encoder = build_encoder(ModelOptions(encoder="fedca-cnn"), channels=3, image_size=32)
        >>> save_encoder("pretrained.safetensors", encoder, {})
        >>> load_weights(encoder, "pretrained.safetensors")
        "35 of the encoder's 35 tensors came from pretrained.safetensors."
    """
    return graft(encoder, read_weights(Path(path)), str(path))


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file, or of a state dict saved with torch.save.

    Raises:
        UserError: The file is missing, damaged or pickled.
    """
    return _read_safetensors(path)[0] if path.suffix == ".safetensors" else _read_pth(path)


def input_of(path: Path) -> Mapping[str, Any]:
    """Read the metadata of an encoder's file that Atoll wrote; empty for other files."""
    if path.suffix != ".safetensors" or not path.is_file():
        return {}
    about = _read_safetensors(path)[1] or {}
    return dict(about.get("metadata") or {})


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """Read the tensors, and the description that `save_encoder` wrote, if there is one."""
    _check_file(path)
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            # A tree describes no encoder.
            about = metadata.get("atoll", "{}" if FILE_KEY in metadata else None)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        described = None if about is None else dict(json.loads(about))
        if described is not None and described.get("format") == FORMAT:
            _verify(path)
        return tensors, described
    except DamagedError as error:
        raise UserError(f"{path} is damaged ({error}); restore it from a copy, or {REMAKE}") from None
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        if zipfile.is_zipfile(path):
            raise UserError(
                f"{path} is an archive, as torch.save and torch.export write them, and not a safetensors file; "
                f"{_REMEDY}"
            ) from error
        raise UserError(
            f"{path} is damaged or not a safetensors file ({error}); if a run wrote it, {REMAKE}; otherwise save "
            f"or fetch it again, or {_REMEDY}"
        ) from error


def has_digest(start: bytes) -> bool:
    """Whether the first bytes of an encoder's file show a digest."""
    return start[8:].startswith(_MARKER)


def _verify(path: Path) -> None:
    data = path.read_bytes()
    if not has_digest(data[:64]):
        raise DamagedError(MISMATCH)
    verify_at(data, _MARKER)


def _read_pth(path: Path) -> dict[str, Tensor]:
    _check_file(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's unpickler can raise any type of exception on damaged bytes
        raise UserError(
            f"{path} is not a file of plain weights that torch can read safely; "
            "save a state dict with torch.save, or use safetensors"
        ) from error
    for key in ("state_dict", "model", "teacher"):  # of training frameworks, of DeiT and of DINOv2
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise UserError(
            f"{path} holds no state dict; save model.state_dict(), and nothing else, with torch.save"
        )
    return state


def _check_file(path: Path) -> None:
    if path.is_dir():
        raise UserError(f"{path} is a folder; name the file in it, such as {path / 'encoder.safetensors'}")
    if not path.exists():
        raise UserError(f"there is no file {path}; check the path")
    try:  # safetensors reports a file that it may not read as missing
        path.open("rb").close()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
