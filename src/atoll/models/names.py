"""A common form of the names under which libraries store the weights of one architecture.

The form is timm's, with query, key and value separated; torchvision's ResNets use it, too. The tables list the
differences of torchvision's ViT, of Hugging Face's ViT, DINOv2 and ResNet (before and since transformers 5), of
DINOv2's own files, of Atoll's ViT, and of a Sequential of a ResNet's children.
"""

from __future__ import annotations

import re

_WRAPPERS = re.compile(
    r"^(module|model|backbone|encoder_q|base_encoder|teacher|student|vit|dinov2|resnet|_orig_mod)\."
)
_RENAMED = [
    (re.compile(pattern), name)
    for pattern, name in (
        (r"^(class_token|embeddings\.cls_token)$", "cls_token"),
        (r"^(encoder\.pos_embedding|embeddings\.position_embeddings|positions)$", "pos_embed"),
        (r"^(register_tokens|embeddings\.register_tokens)$", "reg_token"),
        (r"^(conv_proj|embeddings\.patch_embeddings\.projection|embed)\.", "patch_embed.proj."),
        (r"^(encoder\.)?layers?\.(encoder_layer_)?(\d+)\.", r"blocks.\3."),
        # DINOv2 stores its blocks in chunks; timm's EfficientNets have stages of blocks.
        (r"^blocks\.\d+\.(\d+)\.(?=norm|attn|ls|mlp)", r"blocks.\1."),
        (r"^(encoder\.ln|layernorm|encoder\.norm)\.", "norm."),
        (r"^(blocks\.\d+)\.(ln_1|layernorm_before)\.", r"\1.norm1."),
        (r"^(blocks\.\d+)\.(ln_2|layernorm_after)\.", r"\1.norm2."),
        (r"^(blocks\.\d+)\.(self_attention\.in_proj_|attn\.qkv\.)", r"\1.attn.qkv."),
        (r"^(blocks\.\d+)\.attention\.(attention\.query|q_proj)\.", r"\1.attn.q."),
        (r"^(blocks\.\d+)\.attention\.(attention\.key|k_proj)\.", r"\1.attn.k."),
        (r"^(blocks\.\d+)\.attention\.(attention\.value|v_proj)\.", r"\1.attn.v."),
        (r"^(blocks\.\d+)\.(self_attention\.out_proj|attention\.(output\.dense|o_proj))\.", r"\1.attn.proj."),
        (r"^(blocks\.\d+)\.(mlp\.0|mlp\.linear_1|intermediate\.dense)\.", r"\1.mlp.fc1."),
        (r"^(blocks\.\d+)\.(mlp\.3|mlp\.linear_2|output\.dense)\.", r"\1.mlp.fc2."),
        (r"^(blocks\.\d+)\.layer_scale(\d)\.lambda1$", r"\1.ls\2.gamma"),
        (r"^embedder\.embedder\.convolution\.", "conv1."),
        (r"^embedder\.embedder\.normalization\.", "bn1."),
        (r"(^layer\d+\.\d+)\.shortcut\.convolution\.", r"\1.downsample.0."),
        (r"(^layer\d+\.\d+)\.shortcut\.normalization\.", r"\1.downsample.1."),
        # A Sequential of the children of torchvision's ResNet, as in lightly's examples.
        (r"^0\.(?=weight$)", "conv1."),
        (r"^1\.(?=(weight|bias|running_mean|running_var|num_batches_tracked)$)", "bn1."),
        *((rf"^{stage + 3}\.(?=\d+\.(conv|bn|downsample))", f"layer{stage}.") for stage in range(1, 5)),
    )
]
_RESNET = re.compile(
    r"^encoder\.stages\.(\d+)\.layers\.(\d+)\.(?:layer\.(\d+)\.(convolution|normalization)\.)?"
)


def common_names(name: str) -> list[str]:
    """Common form of a weight's name; three names for a weight that contains query, key and value in sequence.

    Example:
        >>> from atoll.models.names import common_names
        >>> common_names("module.vit.encoder.layer.3.attention.attention.query.weight")
        ['blocks.3.attn.q.weight']
        >>> common_names("blocks.3.attn.qkv.bias")
        ['blocks.3.attn.q.bias', 'blocks.3.attn.k.bias', 'blocks.3.attn.v.bias']
    """
    while (shorter := _WRAPPERS.sub("", name)) != name:
        name = shorter
    name = _RESNET.sub(_resnet_block, name)
    for pattern, replacement in _RENAMED:
        name = pattern.sub(replacement, name)
    if ".attn.qkv." in name:
        return [name.replace(".qkv.", f".{part}.") for part in "qkv"]
    return [name]


def _resnet_block(found: re.Match[str]) -> str:
    stage, block, layer, kind = found.groups()
    prefix = f"layer{int(stage) + 1}.{block}."
    if layer is None:
        return prefix
    return f"{prefix}{'conv' if kind == 'convolution' else 'bn'}{int(layer) + 1}."
