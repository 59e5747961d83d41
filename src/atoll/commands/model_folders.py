"""Folders from which other libraries load an encoder: weights, configuration, preprocessing and a model card."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from atoll.core.errors import UserError
from atoll.core.tensor_file import serialise
from atoll.core.text import plural
from atoll.models import Encoder
from atoll.models.encoder import input_metadata
from atoll.models.exported import CONFIG, KEY, WEIGHTS
from atoll.models.libraries import HUGGING_FACE, TIMM
from atoll.report.formats import markdown_table

CARD, PREPROCESSOR = "README.md", "preprocessor_config.json"
_BILINEAR = 2  # Pillow's number
Files = dict[str, bytes]


def _is_in_timm(encoder: Encoder) -> bool:
    name, stem = encoder.spec["encoder"], encoder.spec.get("stem")
    return name.startswith(TIMM) or (name in ("resnet18", "resnet50") and stem == "standard")


def timm_folder(encoder: Encoder) -> Files:
    """Make the files that ``timm.create_model("local-dir:FOLDER", pretrained=True)`` loads.

    Raises:
        UserError: The encoder is neither timm's nor a ResNet that timm has.
    """
    name = encoder.spec["encoder"]
    about = input_metadata(encoder)
    arguments: dict[str, Any] = {"in_chans": about["channels"]}
    if name.startswith(TIMM):
        if _fixed_size(encoder):
            arguments["img_size"] = about["image_size"]
    elif not _is_in_timm(encoder):
        raise UserError(
            f"the encoder {name!r} has no counterpart in timm: it must be timm:…, or resnet18 or resnet50 with "
            "model.stem = 'standard'; choose the format safetensors, pt2 or onnx"
        )
    shape = [about["channels"], about["image_size"], about["image_size"]]
    pretrained = {
        "input_size": shape,
        "mean": about["mean"],
        "std": about["std"],
        "interpolation": "bilinear",
        "crop_pct": 1.0,
        "crop_mode": "center",
        "num_classes": 0,
    }
    config = {
        "architecture": name.removeprefix(TIMM).partition(".")[0],
        "num_classes": 0,
        "num_features": encoder.dim,
        "model_args": arguments,
        "pretrained_cfg": pretrained,
    }
    use = 'import timm\n\nmodel = timm.create_model("local-dir:FOLDER", pretrained=True).eval()'
    return _files(encoder, config, "timm", use)


def hugging_face_folder(encoder: Encoder) -> Files:
    """Make the files that ``transformers.AutoModel.from_pretrained(FOLDER)`` loads.

    Raises:
        UserError: The encoder is not one of Hugging Face's.
    """
    name, about = encoder.spec["encoder"], input_metadata(encoder)
    if not name.startswith(HUGGING_FACE):
        timm = "timm, " if _is_in_timm(encoder) else ""
        raise UserError(
            f"the encoder {name!r} is no model of Hugging Face's transformers (hf:…); choose the format {timm}"
            "safetensors, pt2 or onnx"
        )
    model: Any = encoder.get_submodule("model")
    config = {
        **json.loads(model.config.to_json_string(use_diff=False)),
        "architectures": [type(model).__name__],
    }
    size = about["image_size"]
    preprocessor = {
        "image_processor_type": "BitImageProcessor",  # as Atoll, but for a crop's centre, which it rounds down
        "do_convert_rgb": about["channels"] == 3,
        "do_resize": True,
        "size": {"shortest_edge": size},
        "resample": _BILINEAR,
        "do_center_crop": True,
        "crop_size": {"height": size, "width": size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": about["mean"],
        "image_std": about["std"],
    }
    use = (
        "from transformers import AutoImageProcessor, AutoModel\n\n"
        'model = AutoModel.from_pretrained("FOLDER").eval()\n'
        'processor = AutoImageProcessor.from_pretrained("FOLDER")'
    )
    files = _files(encoder, config, "transformers", use)
    return {**files, PREPROCESSOR: _json(preprocessor)}


def _supervision(origin: Mapping[str, Any]) -> tuple[str, ...]:
    """The tag of an encoder that was trained without labels."""
    return ("self-supervised-learning",) if origin and not origin.get("supervised") else ()


def model_card(encoder: Encoder, library: str, use: str) -> str:
    """Write the model card: data, partition, protocol, numbers, and how to load the model."""
    about = encoder.metadata
    origin: Mapping[str, Any] = about.get("provenance", {})
    size, classes = about["image_size"], about.get("classes", [])
    lines = [
        "---",
        f"library_name: {library}",
        "pipeline_tag: image-feature-extraction",
        "tags:",
        *(f"- {tag}" for tag in ("federated-learning", *_supervision(origin), "atoll")),
        "---",
        "",
        f"# {encoder.spec['encoder']}, trained in a federation",
        "",
        f"Images of {size} × {size} pixels, {plural(about['channels'], 'channel')}, in 0..1, "
        f"minus mean {about['mean']}, divided by std {about['std']}; output: {encoder.dim} numbers for each image.",
        "",
    ]
    if origin:
        lines += [
            "## Training",
            "",
            f"- Method: {origin['method']}, {origin['rounds']} rounds, seed {origin['seed']}.",
            f"- Data and partition: {origin['setting']}; {origin['clients']} clients.",
            f"- Classes of the data: {', '.join(classes) or 'unknown'}.",
            f"- Trained with {origin['trained_with']}; SHA-256 of the recipe: {origin['recipe_sha256']}.",
            "",
            "## Evaluation",
            "",
            f"On the {origin['split'] or 'unknown'} split. The protocols' constants are rows of the table.",
            "",
            *markdown_table(
                ["protocol and measure", "value"],
                [[key, f"{value:.6g}" if isinstance(value, float) else str(value)]
                 for key, value in origin["results"].items()],
            ),
            "",
        ]  # fmt: skip
    lines += ["## Use", "", "```python", use, "```", ""]
    return "\n".join(lines)


def _files(encoder: Encoder, config: Mapping[str, Any], library: str, use: str) -> Files:
    state = {
        name: tensor.detach().cpu().contiguous() for name, tensor in sorted(encoder.library_state().items())
    }
    described = {**config, KEY: {"spec": encoder.spec, "metadata": encoder.metadata}}
    return {
        CONFIG: _json(described),
        WEIGHTS: b"".join(serialise(state, {"format": "pt"})),
        CARD: model_card(encoder, library, use).encode(),
    }


def _fixed_size(encoder: Encoder) -> bool:
    config = getattr(encoder.get_submodule("model"), "pretrained_cfg", {})
    return bool(config.get("fixed_input_size"))


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


FOLDERS: dict[str, Callable[[Encoder], Files]] = {"huggingface": hugging_face_folder, "timm": timm_folder}
