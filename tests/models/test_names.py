import pytest

from atoll.models.names import common_names

BLOCK = "blocks.2"


@pytest.mark.parametrize(
    ("name", "common"),
    [
        ("layer1.0.conv1.weight", "layer1.0.conv1.weight"),
        ("module.encoder_q.layer1.0.conv1.weight", "layer1.0.conv1.weight"),
        ("resnet.encoder.stages.0.layers.1.layer.0.convolution.weight", "layer1.1.conv1.weight"),
        ("encoder.stages.3.layers.0.layer.1.normalization.running_var", "layer4.0.bn2.running_var"),
        ("encoder.stages.1.layers.0.shortcut.convolution.weight", "layer2.0.downsample.0.weight"),
        ("embedder.embedder.normalization.bias", "bn1.bias"),
        ("vit.embeddings.cls_token", "cls_token"),
        ("embeddings.patch_embeddings.projection.bias", "patch_embed.proj.bias"),
        ("encoder.layer.2.attention.attention.key.weight", f"{BLOCK}.attn.k.weight"),
        ("layers.2.attention.v_proj.bias", f"{BLOCK}.attn.v.bias"),
        ("encoder.layer.2.attention.output.dense.weight", f"{BLOCK}.attn.proj.weight"),
        ("encoder.layer.2.intermediate.dense.weight", f"{BLOCK}.mlp.fc1.weight"),
        ("encoder.layer.2.output.dense.weight", f"{BLOCK}.mlp.fc2.weight"),
        ("encoder.layer.2.layer_scale1.lambda1", f"{BLOCK}.ls1.gamma"),
        ("encoder.layers.encoder_layer_2.self_attention.out_proj.bias", f"{BLOCK}.attn.proj.bias"),
        ("encoder.layers.encoder_layer_2.mlp.linear_2.bias", f"{BLOCK}.mlp.fc2.bias"),
        ("encoder.ln.weight", "norm.weight"),
        ("teacher.backbone.blocks.0.2.norm1.weight", f"{BLOCK}.norm1.weight"),
    ],
)
def test_names_of_each_library_have_one_form(name, common):
    assert common_names(name) == [common]


def test_joint_projections_are_three_names_in_their_order():
    joint = [f"{BLOCK}.attn.{part}.bias" for part in "qkv"]
    assert common_names("blocks.2.attn.qkv.bias") == joint
    assert common_names("encoder.layers.encoder_layer_2.self_attention.in_proj_bias") == joint
