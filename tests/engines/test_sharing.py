"""What trains, what travels and what is stored: frozen weights, personal weights, adapters."""

import warnings
from dataclasses import replace

import pytest
import torch

import atoll
from atoll.core.errors import UserError
from atoll.core.tree import num_bytes
from atoll.engines.client_states import ClientStates
from atoll.engines.federation import Federation
from atoll.models.adapters import is_adapter
from atoll.models.norms import modes, norm_layers
from atoll.recipe.recipe import give
from tests.harness import final_models, remains, run_tiny, tiny
from tests.rounds import Rounds
from tests.steps import Steps
from tests.trees import same

timm = pytest.importorskip("timm", reason="the extra atoll[timm] is not installed")
pytest.importorskip("peft", reason="the extra atoll[peft] is not installed")
pytestmark = pytest.mark.filterwarnings("ignore:model.* does not apply")

VIT = ("method.name=fed_simclr", "model.encoder=timm:test_vit", "data.image_size=32")
LORA = (*VIT, "model.lora_rank=2")
OWN_VIT = ("model.encoder=vit-tiny", "model.width=64", "model.depth=1", "model.stem=cifar")
METHODS = {
    "l_dawa": (),
    "scaffold": (),
    "fedema": (),
    "fed_moco": ("options.moco.queue=32",),
    "fed_barlow": (),
    "fedadam": (),
    "median": (),
    "fedbn": (),
    "moon": (),
}


def initial(*settings):
    torch.set_num_threads(1)
    return Federation(tiny(*settings)).initial_weights()


def test_adapters_travel_and_are_stored_and_the_backbone_is_unchanged_to_the_bit(tmp_path):
    run = run_tiny(tmp_path / "run", *LORA)
    start, trained = initial(*LORA), final_models(run)["global"]
    assert all(is_adapter(name) or name.startswith("projector.") for name in trained)
    assert any(not torch.equal(trained[name], start[name]) for name in trained if "lora_B" in name)
    federation = Federation(tiny(*LORA))
    federation.initial_weights()
    joined = federation.load(trained).state_dict()
    frozen = {f"encoder.{name}": weight for name, weight in joined.items() if not is_adapter(name)}
    assert same(frozen, {name: start[name] for name in frozen})
    rounds = run.metrics[1:]
    base = num_bytes({name: start[name] for name in frozen})
    shared = num_bytes(trained)
    assert rounds[1]["bytes_up"] == pytest.approx(4 * shared, rel=0.01)
    assert rounds[0]["bytes_down"] - rounds[1]["bytes_down"] == 4 * base  # the first download, once a client


def test_the_finished_encoder_is_plain_and_computes_what_the_adapted_one_does(tmp_path):
    run = run_tiny(tmp_path / "run", *LORA)
    federation = Federation(tiny(*LORA))
    federation.initial_weights()
    adapted = federation.load(final_models(run)["global"]).eval()
    images = torch.randn(3, adapted.spec["channels"], 32, 32, generator=torch.Generator().manual_seed(0))
    plain = atoll.load_encoder(run.encoder_path)
    theirs = timm.create_model(
        "test_vit", num_classes=0, img_size=32, in_chans=adapted.spec["channels"]
    ).eval()
    theirs.load_state_dict(plain.library_state())
    with torch.no_grad():
        torch.testing.assert_close(plain(images), adapted(images), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(theirs(images), adapted(images), atol=1e-5, rtol=1e-5)
        adapter_free = build_without(adapted)
        assert not torch.allclose(adapter_free(images), adapted(images), atol=1e-6)


def build_without(adapted):
    from atoll.models import rebuild_encoder
    from atoll.models.adapters import without_adapters

    plain = rebuild_encoder(adapted.spec).eval()
    plain.load_state_dict(without_adapters(adapted.state_dict()))
    return plain


def test_adapters_start_from_pretrained_weights(tmp_path):
    channels = tiny(*LORA).data.channels
    theirs = timm.create_model("test_vit", img_size=32, in_chans=channels)
    torch.save(theirs.state_dict(), tmp_path / "theirs.pth")
    start = initial(*LORA, f"model.weights={tmp_path / 'theirs.pth'}")
    name = "blocks.1.attn.qkv"
    assert torch.equal(
        start[f"encoder.model.{name}.base_layer.weight"], theirs.state_dict()[f"{name}.weight"]
    )
    assert not start[f"encoder.model.{name}.lora_B.default.weight"].any()


def test_a_personal_head_stays_at_its_client_and_the_backbone_is_shared(tmp_path):
    settings = ("method.name=fed_simclr", "method.share=['encoder.*']", "train.rounds=3")
    run = run_tiny(tmp_path / "run", *settings)
    assert all(name.startswith("encoder.") for name in final_models(run)["global"])
    states = ClientStates(run.checkpoints / "clients")
    heads = [states.load(client, 3)["personal"] for client in range(4)]
    assert all(name.startswith("projector.") for head in heads for name in head)
    assert not same(heads[0], heads[1])
    start = initial(*settings)
    assert not torch.equal(heads[0]["projector.0.weight"], start["projector.0.weight"])
    cut = run_tiny(tmp_path / "cut", *settings[:-1], "train.rounds=2")
    assert same(
        {**remains(run_tiny(cut.folder, *settings, resume=True)), "encoders": {}},
        {**remains(run), "encoders": {}},
    )


def test_frozen_layers_with_batchnorm_do_not_change_at_all(tmp_path):
    settings = (
        "method.name=fed_simclr",
        "model.freeze=['encoder.conv1.*','encoder.bn1.*','encoder.layer1.*']",
    )
    run = run_tiny(tmp_path / "run", *settings)
    frozen = ("encoder.conv1.", "encoder.bn1.", "encoder.layer1.")
    assert not any(name.startswith(frozen) for name in final_models(run)["global"])
    start, encoder = initial(*settings), atoll.load_encoder(run.encoder_path).state_dict()
    same_names = [name for name in start if name.startswith(frozen)]
    assert any(name.endswith("running_mean") for name in same_names)
    assert all(torch.equal(encoder[name.removeprefix("encoder.")], start[name]) for name in same_names)
    assert not torch.equal(encoder["layer4.0.conv1.weight"], start["encoder.layer4.0.conv1.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_kind_of_method_works_on_what_is_shared(tmp_path, method):
    encoder = ("model.encoder=timm:test_vit", "data.image_size=32", "model.lora_rank=2")
    if method == "fedbn":  # it needs BatchNorm
        encoder = ("model.freeze=['encoder.layer1.*']",)
    settings = (f"method.name={method}", *METHODS[method], *encoder)
    one = run_tiny(tmp_path / "one", *settings)
    assert one.metrics[-1]["clients"] == 4  # the checks refused none
    two = run_tiny(tmp_path / "two", *settings, "engine.workers=2")
    assert same(remains(one), remains(two))
    assert not any("base_layer" in name for model in final_models(one).values() for name in model)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (("model.freeze=['layer1.*']",), r"model.freeze names 'layer1\.\*', which matches no weight"),
        (("method.share=['head.*']",), r"method.share names 'head\.\*', which matches no weight"),
        (("model.freeze=['*']",), "model.freeze leaves no weight to train"),
        (("model.lora_rank=2",), r"no layer of the encoder matches model.lora_targets.*layers are conv1"),
        # PyTorch's attention has layers whose weights it reads without calling them.
        (
            (*OWN_VIT, "model.lora_rank=2", "model.lora_targets=['*.out_proj']"),
            r"no layer of the encoder matches .*layers are embed, blocks\.0\.mlp\.0, blocks\.0\.mlp\.[0-9]$",
        ),
    ],
)
def test_mistakes_get_one_sentence(settings, sentence):
    with pytest.raises(UserError, match=sentence):
        Federation(tiny(*settings))


def test_every_adapter_trains():
    rounds = Rounds("method.name=fed_simclr", *OWN_VIT, "model.lora_rank=2", "model.lora_targets=['*']")
    networks = rounds.client.networks
    rounds.train(0)
    second = [name for name, _ in networks.named_parameters() if ".lora_B." in name]
    assert len(second) == 3
    state = networks.state_dict()
    assert all(bool(state[name].any()) for name in second), "B, which is 0 at first, must have moved"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_small_patch16_224"])
def test_bytes_over_a_run_fall_fiftyfold(tmp_path, name):
    """Rank 4, a projector of 128 and 64, 100 rounds of two clients; the bytes do not depend on the training."""
    settings = (
        "method.name=fed_simclr", f"model.encoder=timm:{name}", "data.image_size=32", "partition.clients=2",
        "model.projector_hidden=[128]", "model.projector_dim=64", "train.epochs=0", "train.rounds=100",
        "evaluation.at_end=[]", "engine.checkpoint_every=100",
    )  # fmt: skip
    totals = {}
    for what, extra in {"full": (), "lora": ("model.lora_rank=4",)}.items():
        rounds = run_tiny(tmp_path / what, *settings, *extra).metrics[1:]
        totals[what] = sum(line["bytes_up"] + line["bytes_down"] for line in rounds)
    assert totals["full"] >= 50 * totals["lora"], totals


def test_a_frozen_norm_rests_while_the_others_train():
    rounds = Rounds("method.name=fed_simclr", "model.freeze=['encoder.bn1.*']")
    rounds.start(0)
    encoder = rounds.client.networks["encoder"]
    assert not encoder.bn1.training
    assert encoder.layer1[0].bn1.training


def frozen_norms(networks):
    return norm_layers(networks["encoder"]).values()


@pytest.mark.parametrize("method", ["fed_byol", "fed_moco", "fed_dino", "orchestra"])
def test_frozen_norms_rest_in_a_momentum_target_too(method):
    client = Steps(f"method.name={method}", "model.freeze=['encoder.*']").client
    (target,) = client.copies.values()
    assert not any(norm.training for norm in frozen_norms(target))
    assert all(norm.training for norm in norm_layers(target["projector"]).values())
    assert target["projector"].training


def test_a_frozen_encoder_and_its_momentum_target_agree():
    steps = Steps("method.name=fed_byol", "model.freeze=['encoder.*']")
    (target,) = steps.client.copies.values()
    images = steps.batch().images["view1"]
    assert torch.equal(steps.encode(images)[0], steps.encode(images, target)[0])


def test_frozen_norms_rest_after_a_pass_without_augmentation():
    rounds = Rounds("method.name=fed_simclr", "model.freeze=['encoder.bn1.*']")
    context = rounds.client_context()
    before = modes(context.networks)
    context.outputs(context.networks, "h")
    assert modes(context.networks) == before
    assert not context.networks["encoder"].bn1.training


class Still(torch.nn.Sequential):
    data_config = {"input_size": (1, 8, 8), "mean": (0.5,), "std": (0.5,)}  # noqa: RUF012

    def __init__(self):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))


@pytest.mark.parametrize("trained", [0, 1, 2])
def test_a_given_encoder_that_cannot_train_is_said(trained):
    """Unless a part of it trains, or the recipe says that it is to stay."""
    encoder = Still().requires_grad_(False)
    for layer in [encoder[1], encoder[3]][:trained]:
        layer.requires_grad_(True)
    recipe = give(tiny("method.name=fed_simclr", "model.width=16", "model.stem=cifar"), encoder=encoder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Federation(recipe)
        if not trained:
            Federation(replace(recipe, model=replace(recipe.model, freeze=("encoder.*",))))
    said = [str(one.message) for one in caught if "requires_grad is False" in str(one.message)]
    assert len(said) == (trained == 0)
    if not trained:
        assert "encoder.requires_grad_(True)" in said[0]
        with pytest.raises(UserError, match=r"given encoder's .*requires_grad_\(True\)"):
            Federation(replace(recipe, model=replace(recipe.model, projector="none")))
