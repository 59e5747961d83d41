"""Weights of each library in the network of another: the two networks must compute the same."""

import hashlib

import pytest
import safetensors.torch
import torch
import torchvision

from atoll.core.errors import UserError
from atoll.models import ModelOptions, build_encoder, load_pretrained, save_encoder, weights_input
from atoll.models.pretrained import fit
from atoll.models.vit import resample_patches, resample_positions
from atoll.recipe.recipe import make_recipe
from tests.harness import run_tiny

timm = pytest.importorskip("timm", reason="the extra atoll[timm] is not installed")
transformers = pytest.importorskip("transformers", reason="the extra atoll[hf] is not installed")

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def timm_vit(**options):
    return timm.models.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=64, depth=2, num_heads=1, num_classes=0, **options
    )


def hugging_face_vit():
    return transformers.ViTModel(
        transformers.ViTConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=1, intermediate_size=256, image_size=32,
            patch_size=8, layer_norm_eps=1e-6, qkv_bias=True,
        ),
        add_pooling_layer=False,
    )  # fmt: skip


def torchvision_vit():
    network = torchvision.models.VisionTransformer(32, 8, 2, 1, 64, 256)
    network.heads = torch.nn.Identity()
    return network


def old_names(state):
    """Hugging Face's names before transformers 5, which most files on its hub have."""
    renamed = {}
    for name, tensor in state.items():
        for new, old in (
            ("layers.", "vit.encoder.layer."), ("attention.q_proj", "attention.attention.query"),
            ("attention.k_proj", "attention.attention.key"), ("attention.v_proj", "attention.attention.value"),
            ("attention.o_proj", "attention.output.dense"), ("mlp.fc1", "intermediate.dense"),
            ("mlp.fc2", "output.dense"),
        ):  # fmt: skip
            name = name.replace(new, old)
        renamed[name] = tensor
    return renamed


def features(network):
    network.eval()
    with torch.no_grad():
        out = network(IMAGES)
    return out if isinstance(out, torch.Tensor) else out.last_hidden_state[:, 0]


VITS = {"timm": timm_vit, "hugging face": hugging_face_vit, "torchvision": torchvision_vit}


@pytest.mark.parametrize("source", VITS)
@pytest.mark.parametrize("target", VITS)
def test_a_vit_of_one_library_computes_in_another_what_it_computed(source, target):
    torch.manual_seed(0)
    given, taking = VITS[source](), VITS[target]()
    with torch.no_grad():  # biases and class tokens are zero at first, which would hide mistakes
        for weight in given.parameters():
            weight += 0.02 * torch.randn_like(weight)
    found = fit(taking.state_dict(), given.state_dict())
    assert found.keys() == taking.state_dict().keys()
    taking.load_state_dict(found)
    torch.testing.assert_close(features(taking), features(given), atol=1e-5, rtol=1e-5)


def test_hugging_faces_old_names_are_its_new_ones():
    given, taking = hugging_face_vit(), timm_vit()
    assert all(
        torch.equal(one, fit(taking.state_dict(), given.state_dict())[name])
        for name, one in fit(taking.state_dict(), old_names(given.state_dict())).items()
    )
    assert len(fit(taking.state_dict(), old_names(given.state_dict()))) == len(taking.state_dict())


def test_a_resnet_of_hugging_face_computes_in_atolls_what_it_computed():
    theirs = transformers.ResNetModel(
        transformers.ResNetConfig(hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic")
    )
    encoder = build_encoder(ModelOptions(encoder="resnet18", stem="standard"), 3, 32).eval()
    encoder.load_state_dict(fit(encoder.state_dict(), theirs.state_dict()))
    with torch.no_grad():
        expected = theirs.eval()(IMAGES).pooler_output.flatten(1)
        torch.testing.assert_close(encoder(IMAGES), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("before", "after"), [(197, 1370), (1370, 197), (196, 49), (5, 10)])
def test_position_embeddings_are_interpolated_as_timm_does(before, after):
    positions = torch.randn(1, before, 8, generator=torch.Generator().manual_seed(1))
    first = before in (197, 1370, 5)  # a class token precedes the grid
    side = int((after - first) ** 0.5)
    expected = timm.layers.resample_abs_pos_embed(positions, [side, side], num_prefix_tokens=int(first))
    torch.testing.assert_close(resample_positions(positions, after), expected)


@pytest.mark.parametrize(("before", "after"), [(16, 8), (4, 7), (14, 16)])
def test_patch_embeddings_are_resampled_as_timm_does(before, after):
    weight = torch.randn(5, 3, before, before, generator=torch.Generator().manual_seed(1))
    expected = timm.layers.resample_patch_embed(weight, [after, after])
    torch.testing.assert_close(resample_patches(weight, after), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("channels", [3, 1])
def test_a_vit_of_other_patches_gives_all_its_weights(channels):
    """timm's patches of 16 pixels, for Atoll's ViT with patches of 4 in a linear layer, and for timm's of 8."""
    state = timm.create_model("vit_tiny_patch16_224", num_classes=0).state_dict()
    kernel = state["patch_embed.proj.weight"]
    kernel = kernel if channels == 3 else kernel.sum(1, keepdim=True)
    ours = build_encoder(ModelOptions(encoder="vit-tiny", patch=4), channels, 32)
    found = fit(ours.library_state(), state)
    assert found.keys() == ours.library_state().keys()
    torch.testing.assert_close(found["embed.weight"], resample_patches(kernel, 4).flatten(1))
    eight = timm.create_model(
        "vit_tiny_patch16_224", num_classes=0, patch_size=8, img_size=32, in_chans=channels
    )
    found = fit(eight.state_dict(), state)
    assert found.keys() == eight.state_dict().keys()
    torch.testing.assert_close(found["patch_embed.proj.weight"], resample_patches(kernel, 8))


def test_positions_without_the_same_tokens_before_the_grid_do_not_fit():
    assert resample_positions(torch.zeros(1, 197, 8), 49) is None


def test_what_fits_is_counted_and_less_than_half_is_refused(tmp_path):
    torch.manual_seed(0)
    state = torchvision.models.resnet18().state_dict()
    torch.save(
        {"state_dict": {f"module.{name}": one for name, one in state.items()}}, tmp_path / "theirs.pth"
    )
    encoder = build_encoder(ModelOptions(encoder="resnet18", stem="cifar"), 3, 32)
    found = load_pretrained(encoder, str(tmp_path / "theirs.pth"))
    total = sum(weight.numel() for weight in encoder.parameters())
    assert found.share == pytest.approx(1 - 3 * 3 * 3 * 64 / total)
    assert str(found).startswith("119 of 120 tensors, 100 % of the weights, came from")
    assert str(found).endswith(
        "missing conv1.weight; not used: module.conv1.weight, module.fc.weight, module.fc.bias"
    )
    assert torch.equal(encoder.layer4[1].conv2.weight, state["layer4.1.conv2.weight"])
    few = {name: one for name, one in state.items() if name.startswith(("layer1", "layer2", "layer3"))}
    safetensors.torch.save_file(few, tmp_path / "few.safetensors")
    untouched = {name: one.clone() for name, one in encoder.state_dict().items()}
    with pytest.raises(
        UserError, match=r"84 of 120 tensors, 24\.8 % of the weights.*model.weights_least = 0.24"
    ):
        load_pretrained(encoder, str(tmp_path / "few.safetensors"))
    assert all(torch.equal(one, untouched[name]) for name, one in encoder.state_dict().items())
    assert load_pretrained(encoder, str(tmp_path / "few.safetensors"), least=0.2).share < 0.25


def test_blocks_of_a_deeper_network_are_named_as_not_used(tmp_path):
    theirs = torchvision.models.resnet34()
    torch.save(theirs.state_dict(), tmp_path / "deeper.pth")
    encoder = build_encoder(ModelOptions(encoder="resnet18", stem="standard"), 3, 32)
    found = load_pretrained(encoder, str(tmp_path / "deeper.pth"))
    assert (found.missing, found.share) == ((), 1)
    assert set(found.unused) == theirs.state_dict().keys() - encoder.library_state().keys()
    assert "; not used: layer1.2.conv1.weight, " in str(found)
    assert str(found).endswith(f" and {len(found.unused) - 4} more")


def test_one_channel_takes_the_sum_over_three(tmp_path):
    state = torchvision.models.resnet18().state_dict()
    safetensors.torch.save_file(state, tmp_path / "theirs.safetensors")
    encoder = build_encoder(ModelOptions(encoder="resnet18", stem="standard"), 1, 32)
    assert load_pretrained(encoder, str(tmp_path / "theirs.safetensors")).missing == ()
    grey = IMAGES[:, :1]
    theirs = torch.nn.functional.conv2d(
        grey.expand(-1, 3, -1, -1), state["conv1.weight"], stride=2, padding=3
    )
    torch.testing.assert_close(encoder.conv1(grey), theirs, atol=1e-5, rtol=1e-4)


def test_the_statistics_of_the_images_come_with_the_weights(tmp_path):
    imagenet = (0.485, 0.456, 0.406)
    safetensors.torch.save_file(torchvision.models.resnet18().state_dict(), tmp_path / "classes.safetensors")
    assert weights_input(str(tmp_path / "classes.safetensors")).mean == imagenet
    assert weights_input("timm:test_vit").mean == (0.5, 0.5, 0.5)
    few = build_encoder(ModelOptions(encoder="resnet-narrow", width=4), 1, 8)
    safetensors.torch.save_file(few.state_dict(), tmp_path / "unknown.safetensors")
    assert weights_input(str(tmp_path / "unknown.safetensors")).mean is None
    save_encoder(tmp_path / "ours.safetensors", few, {"mean": [0.3], "std": [0.2], "image_size": 8})
    assert weights_input(str(tmp_path / "ours.safetensors")).std == (0.2,)
    model = {"encoder": "resnet18", "weights": str(tmp_path / "classes.safetensors")}
    assert make_recipe({"model": model}).views.mean == imagenet
    assert make_recipe({"model": model, "views": {"mean": [0.1]}}).views.mean == (0.1,)


def test_a_run_starts_from_the_weights_and_says_so(tmp_path):
    few = build_encoder(ModelOptions(encoder="resnet-narrow", width=4, stem="strided"), 1, 8)
    safetensors.torch.save_file(few.state_dict(), tmp_path / "few.safetensors")
    count = len(few.state_dict())
    run = run_tiny(tmp_path / "run", "train.rounds=0", f"model.weights={tmp_path / 'few.safetensors'}")
    assert run.metrics[0]["start"].startswith(f"{count} of {count} tensors, 100 % of the weights, came from")
    trained = safetensors.torch.load_file(run.encoder_path)
    assert all(torch.equal(trained[name], one) for name, one in few.state_dict().items())


@pytest.mark.parametrize("prefix", ["", "module."])
def test_blocks_within_stages_are_not_taken_for_one_another(tmp_path, prefix):
    timm = pytest.importorskip("timm")
    theirs = timm.create_model("test_efficientnet")
    names = theirs.state_dict()
    assert len([name for name in names if name.startswith("blocks.") and name[9] == "0"]) > 10  # blocks.*.0
    torch.save({prefix + name: tensor for name, tensor in names.items()}, tmp_path / "theirs.pth")
    encoder = build_encoder(ModelOptions(encoder="timm:test_efficientnet"), channels=3, image_size=32)
    assert load_pretrained(encoder, str(tmp_path / "theirs.pth")).missing == ()
    for name, tensor in encoder.library_state().items():
        assert torch.equal(tensor, names[name]), name


def test_names_that_could_mean_two_tensors_are_not_guessed():
    shape = {f"blocks.{i}.0.attn.proj.bias": torch.zeros(3) for i in range(2)}
    state = {name: torch.full((3,), i + 1.0) for i, name in enumerate(shape)}
    same = fit(shape, state)
    assert all(torch.equal(same[name], state[name]) for name in shape)
    assert fit(shape, {f"module.{name}": tensor for name, tensor in state.items()}) == {}


def test_a_resumed_run_refuses_other_weights(tmp_path):
    few = build_encoder(ModelOptions(encoder="resnet-narrow", width=4, stem="strided"), 1, 8)
    file = tmp_path / "few.safetensors"
    safetensors.torch.save_file(few.state_dict(), file)
    started = (f"model.weights={file}", "train.rounds=1")
    run = run_tiny(tmp_path / "run", *started)
    assert run.read_json("weights.json")["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    run_tiny(run.folder, f"model.weights={file}", "train.rounds=2", resume=True)
    few.conv1.weight.data.add_(1)
    safetensors.torch.save_file(few.state_dict(), file)
    with pytest.raises(UserError, match=r"was started from other weights than .*few.safetensors' holds now"):
        run_tiny(run.folder, f"model.weights={file}", "train.rounds=3", resume=True)


def test_the_counter_of_a_norm_after_a_joint_projection_is_read(tmp_path):
    model = timm.create_model("levit_128s", num_classes=0)
    torch.save(model.state_dict(), tmp_path / "levit.pth")
    encoder = build_encoder(ModelOptions(encoder="timm:levit_128s"), 3, 224)
    assert load_pretrained(encoder, str(tmp_path / "levit.pth")).missing == ()


def test_a_library_knows_the_statistics_of_its_model_better_than_a_file_of_weights(tmp_path):
    state = timm.create_model("vit_tiny_patch16_224").state_dict()
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    weights = str(tmp_path / "model.safetensors")
    assert weights_input(weights).mean == (0.485, 0.456, 0.406)  # a guess by the number of classes
    made = make_recipe({"model": {"encoder": "timm:vit_tiny_patch16_224", "weights": weights}})
    assert made.views.mean == tuple(timm.get_pretrained_cfg("vit_tiny_patch16_224").mean) == (0.5, 0.5, 0.5)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_a_sequential_of_a_resnets_children_computes_in_a_resnet_what_it_computed(name, tmp_path):
    """As lightly's examples build it, within a checkpoint with the projection head."""
    torch.manual_seed(0)
    resnet = getattr(torchvision.models, name)()
    backbone = torch.nn.Sequential(*list(resnet.children())[:-1], torch.nn.Flatten())
    backbone(torch.rand(8, 3, 32, 32))  # running statistics of its own
    head = {
        "projection_head.layers.0.weight": torch.rand(4, 4),
        "projection_head.layers.1.weight": torch.rand(4),
    }
    state = {f"backbone.{key}": value for key, value in backbone.state_dict().items()}
    torch.save({"state_dict": state | head, "epoch": 3}, tmp_path / "last.ckpt")
    encoder = build_encoder(ModelOptions(encoder=name, stem="standard"), channels=3, image_size=32).eval()
    found = load_pretrained(encoder, str(tmp_path / "last.ckpt"))
    assert (found.share, found.missing, len(found.unused)) == (1.0, (), 2)
    images = torch.rand(4, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(encoder(images), backbone.eval()(images))


def test_an_own_sequential_takes_its_own_weights():
    """Its first two layers are not a ResNet's."""
    own = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 5), torch.nn.Linear(5, 5))
    found = fit(own.state_dict(), {key: value + 1 for key, value in own.state_dict().items()})
    assert {key: value - 1 for key, value in found.items()}.keys() == own.state_dict().keys()
    for key, value in own.state_dict().items():
        assert torch.equal(found[key], value + 1)
