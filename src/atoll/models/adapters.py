"""The choice of an encoder's weights that train: name patterns, and low-rank adapters (LoRA) through peft.

Reference:
    Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022, https://arxiv.org/abs/2106.09685.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch import Tensor, nn

from atoll.core.errors import UserError, warn
from atoll.core.extras import require
from atoll.core.text import few
from atoll.models.encoder import Encoder
from atoll.models.libraries import MissingEncoderError
from atoll.models.norms import named_weights

if TYPE_CHECKING:
    from atoll.models.options import ModelOptions

LORA_TARGETS = ("*.qkv", "*.q_proj", "*.v_proj", "*.query", "*.value")
_LORA, _BASE = ".lora_", ".base_layer."


def matching(names: Iterable[str], patterns: Sequence[str], option: str) -> set[str]:
    """Names that match one of the patterns, as in a shell, where ``*`` matches any text.

    Raises:
        UserError: A pattern matches nothing.

    Example:
        >>> from atoll.models.adapters import matching
        >>> sorted(matching(["encoder.conv1.weight", "projector.0.bias"], ["projector.*"], "method.share"))
        ['projector.0.bias']
    """
    names = list(names)
    found: set[str] = set()
    for pattern in patterns:
        now = {name for name in names if fnmatchcase(name, pattern)}
        if not now:
            raise UserError(
                f"{option} names {pattern!r}, which matches no weight; the names are like {names[0]!r} and "
                f"{names[-1]!r}, and * stands for any text"
            )
        found |= now
    return found


def add_adapters(encoder: Encoder, rank: int, alpha: int, targets: Sequence[str]) -> None:
    """Add low-rank adapters to an encoder's layers, in place: W x + (α / r) B A x, with B = 0 at first.

    The weights W get the name ``….base_layer.weight``, A and B ``….lora_A.default.weight`` and ``….lora_B.…``. A is
    drawn from torch's default generator.

    Args:
        encoder: The encoder.
        rank: r, the rank of B A.
        alpha: α.
        targets: Patterns over the names of its linear and convolutional layers. Layers inside PyTorch's own
            attention do not count, because `torch.nn.MultiheadAttention` reads their weights and never calls them.

    Raises:
        UserError: peft is not installed, no layer matches, or a matching layer cannot have an adapter.
    """
    peft = require("peft", "peft", "model.lora_rank", MissingEncoderError)
    modules = dict(encoder.named_modules())
    attention = [name for name, layer in modules.items() if isinstance(layer, nn.MultiheadAttention)]
    layers = [
        name
        for name, layer in modules.items()
        if isinstance(layer, nn.Linear | nn.Conv2d) and name.rpartition(".")[0] not in attention
    ]
    chosen = [name for name in layers if any(fnmatchcase(name, pattern) for pattern in targets)]
    if not chosen:
        raise UserError(
            f"no layer of the encoder matches model.lora_targets = {list(targets)}; its linear and convolutional "
            f"layers are {few(layers, 6)}"
        )
    if unfit := [name for name in chosen if not _takes_adapter(encoder, modules[name])]:
        raise UserError(
            f"model.lora_targets matches {few(unfit, 6)}, which cannot have an adapter: the weights are another "
            "layer's too, or computed (weight_norm and other parametrizations), or the convolution has groups, "
            "dilation or another padding than zeros; name other layers"
        )
    only = "|".join(map(re.escape, chosen))  # a pattern, because peft takes names in a list as endings
    config = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=only, lora_dropout=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about models that are not of transformers' types
        peft.inject_adapter_in_model(config, encoder)


def _takes_adapter(encoder: Encoder, layer: nn.Module) -> bool:
    """Whether peft can add an adapter to a layer, and later store its product in the layer's weight alone."""
    weight = dict(layer.named_parameters(recurse=False)).get("weight")
    owners = sum(one is weight for one in named_weights(encoder).values())
    plain = not isinstance(layer, nn.Conv2d) or (
        layer.groups == 1 and set(layer.dilation) == {1} and layer.padding_mode == "zeros"
    )
    return weight is not None and owners == 1 and plain


def is_adapter(name: str) -> bool:
    """Whether a weight belongs to an adapter.

    Example:
        >>> from atoll.models.adapters import is_adapter
        >>> is_adapter("encoder.blocks.0.attn.qkv.lora_A.default.weight")
        True
    """
    return _LORA in name


def has_adapters(encoder: nn.Module) -> bool:
    """Whether an encoder has adapters."""
    return any(is_adapter(name) for name, _ in encoder.named_parameters())


def merged(encoder: Encoder) -> Encoder:
    """The encoder with its adapters merged into its weights, W + (α / r) B A; itself if it has none."""
    if not has_adapters(encoder):
        return encoder
    from peft.tuners.tuners_utils import BaseTunerLayer

    plain = copy.deepcopy(encoder)
    for name, layer in list(plain.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            layer.merge()
            parent, _, child = name.rpartition(".")
            setattr(plain.get_submodule(parent), child, layer.get_base_layer())
    return plain.requires_grad_(True)


def without_adapters(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state with the names of an encoder without adapters; the tensors are shared with ``state``."""
    return {name.replace(_BASE, "."): tensor for name, tensor in state.items() if not is_adapter(name)}


def freeze(networks: nn.ModuleDict, options: ModelOptions) -> None:
    """Stop the training of the weights that ``model.freeze`` names; with adapters, by default of all others.

    Raises:
        UserError: A pattern matches no weight, or nothing would train.
    """
    patterns = options.freeze or (("encoder.*",) if options.lora_rank else ())
    weights = named_weights(networks)
    names = matching(weights, patterns, "model.freeze")
    for name, weight in weights.items():
        if name in names and not is_adapter(name):
            weight.requires_grad_(False)
    given = "the given encoder's weights do not train: their requires_grad is False"
    if not any(weight.requires_grad for weight in networks.parameters()):
        raise UserError(
            "model.freeze leaves no weight to train; name fewer"
            if patterns
            else f"{given}, and nothing else trains; set it with encoder.requires_grad_(True)"
        )
    own = list(networks["encoder"].parameters())
    if own and not patterns and not any(weight.requires_grad for weight in own):
        warn(
            f"{given}, so only the heads train and the encoder stays as it is; set it with "
            'encoder.requires_grad_(True), or state it in the recipe: model.freeze = ["encoder.*"]',
        )
