import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torchvision

from atoll.core.errors import UserError
from atoll.core.process_state import seeded_streams
from atoll.models import ModelOptions, build_encoder, give_encoder, load_encoder, load_weights, save_encoder

METADATA = {"normalisation": {"mean": [0.5], "std": [0.25]}, "method": "ssd", "b": 1, "a": None}


def narrow(seed=0, **options):
    torch.manual_seed(seed)
    return build_encoder(ModelOptions(encoder="resnet-narrow", width=8, stem="strided", **options), 1, 16)


@pytest.mark.parametrize("name", ["e.safetensors", "e.pth"])
def test_a_file_that_may_not_be_read_is_not_called_damaged(name, tmp_path, monkeypatch):
    path = tmp_path / name
    path.write_bytes(b"secret")

    def refuse(path, mode):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError, match=rf"^cannot read {path}: Permission denied$"):
        load_weights(narrow(), path)


@pytest.mark.parametrize("name", ["resnet-narrow", "fedquad-cnn", "fedca-cnn", "vit-tiny"])
def test_round_trip_gives_the_same_encoder(name, tmp_path):
    torch.manual_seed(0)
    options = {"vit-tiny": {"width": 64, "depth": 2, "patch": 4}}.get(name, {})
    encoder = build_encoder(ModelOptions(encoder=name, **options), 1, 16)
    images = torch.rand(4, 1, 16, 16)
    encoder(images)  # moves the norms' buffers
    save_encoder(tmp_path / "e.safetensors", encoder, METADATA)
    loaded = load_encoder(str(tmp_path / "e.safetensors"))
    assert not loaded.training
    assert (loaded.dim, loaded.spec, loaded.metadata) == (encoder.dim, encoder.spec, METADATA)
    assert torch.equal(loaded(images), encoder.eval()(images))
    state = loaded.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in encoder.state_dict().items())
    assert {value.dtype for value in state.values()} == {
        value.dtype for value in encoder.state_dict().values()
    }


SAVE = """
import sys, torch
from atoll.models import ModelOptions, build_encoder, save_encoder
torch.manual_seed(0)
encoder = build_encoder(ModelOptions(encoder="resnet-narrow", width=8, stem="strided"), 1, 16)
if sys.argv[2] == "channels_last":
    encoder = encoder.to(memory_format=torch.channels_last)
save_encoder(sys.argv[1], encoder, dict(eval(sys.argv[3])))
"""


def test_equal_weights_give_equal_bytes_across_processes(tmp_path):
    digests = set()
    for layout, metadata in [("contiguous", METADATA), ("channels_last", dict(reversed(METADATA.items())))]:
        path = tmp_path / f"{layout}.safetensors"
        subprocess.run([sys.executable, "-c", SAVE, str(path), layout, repr(metadata)], check=True)
        digests.add(hashlib.sha256(path.read_bytes()).hexdigest())
    assert len(digests) == 1
    save_encoder(tmp_path / "here.safetensors", narrow(), METADATA)
    assert hashlib.sha256((tmp_path / "here.safetensors").read_bytes()).hexdigest() in digests


def test_saving_and_loading_leave_the_random_state_alone(tmp_path):
    encoder = narrow()
    before = torch.get_rng_state()
    save_encoder(tmp_path / "e.safetensors", encoder, {})
    load_encoder(tmp_path / "e.safetensors")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_failed_write_leaves_the_older_file_and_no_rubbish(tmp_path, monkeypatch):
    path = tmp_path / "e.safetensors"
    save_encoder(path, narrow(), {})
    before = path.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match=r"the disk is full: .*e\.safetensors could not be written"):
        save_encoder(path, narrow(1), {})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_an_older_file_is_replaced_and_never_overwritten(tmp_path):
    path = tmp_path / "e.safetensors"
    save_encoder(path, narrow(), {})
    with path.open("rb") as reader:  # a reader of the older file sees all of it, whatever happens to the name
        before = path.read_bytes()
        save_encoder(path, narrow(1), {})
        assert reader.read() == before
    assert path.read_bytes() != before


def test_a_folder_that_cannot_be_made_gets_a_sentence(tmp_path):
    (tmp_path / "no").write_text("a file in the folder's place")
    with pytest.raises(UserError, match=r"cannot write .*e\.safetensors"):
        save_encoder(tmp_path / "no" / "e.safetensors", narrow(), {})


def test_an_encoder_made_by_hand_cannot_be_saved(tmp_path):
    encoder = narrow()
    encoder.spec = {}
    with pytest.raises(UserError, match="has no spec"):
        save_encoder(tmp_path / "e.safetensors", encoder, {})


def damaged_files(path):
    """Pairs of a spoiled file's bytes and the sentence that it should get."""
    whole = path.read_bytes()
    tensors = safetensors.torch.load(whole)
    del tensors["bn1.bias"]
    about = {"format": 1, "spec": narrow().spec, "metadata": {}}
    return [
        (b"just a text file", "damaged or not a safetensors file"),
        (b"", "damaged or not a safetensors file"),
        (whole[: len(whole) // 2], "damaged or not a safetensors file"),
        (safetensors.torch.save({"w": torch.ones(2)}), "holds weights without the description of an encoder"),
        (safetensors.torch.save({"w": torch.ones(2)}, {"atoll": "3"}), "damaged or not a safetensors file"),
        (safetensors.torch.save({"w": torch.ones(2)}, {"atoll": '{"format": 99}'}), "has format 99"),
        (
            safetensors.torch.save({"w": torch.ones(2)}, {"atoll": '{"format": 1}'}),
            "does not fit its weights",
        ),
        (safetensors.torch.save(tensors, {"atoll": json.dumps(about)}), "does not fit its weights"),
        (whole.replace(b"resnet-narrow", b"resnet-norrow"), "its digest does not match its content"),
        (whole.replace(b'width\\": 8', b'width\\": 4'), "its digest does not match its content"),
        (
            safetensors.torch.save(tensors, {"atoll": json.dumps(about).replace("narrow", "norrow")}),
            "does not fit",
        ),
    ]


def test_files_that_are_not_ours_get_one_sentence(tmp_path):
    good, bad = tmp_path / "good.safetensors", tmp_path / "bad.safetensors"
    save_encoder(good, narrow(), {})
    for data, sentence in damaged_files(good):
        assert data != good.read_bytes()
        bad.write_bytes(data)
        with pytest.raises(UserError, match=sentence) as error:
            load_encoder(bad)
        assert "\n" not in str(error.value)
        assert str(bad) in str(error.value)
    with pytest.raises(UserError, match="there is no file"):
        load_encoder(tmp_path / "absent.safetensors")
    with pytest.raises(UserError, match="is a folder"):
        load_encoder(tmp_path)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_torchvision_weights_warm_up_everything_but_the_stem(tmp_path, suffix):
    torch.manual_seed(3)
    published = torchvision.models.resnet18(weights=None).state_dict()
    path = tmp_path / f"resnet18{suffix}"
    if suffix == ".pth":
        torch.save({"state_dict": published}, path)
    else:
        safetensors.torch.save_file(published, path)
    encoder = build_encoder(ModelOptions(), 3, 32)
    stem = encoder.conv1.weight.clone()
    sentence = load_weights(encoder, path)
    assert torch.equal(encoder.conv1.weight, stem)
    own = encoder.state_dict()
    assert all(torch.equal(own[k], published[k]) for k in own if k != "conv1.weight")
    assert sentence == (
        f"119 of the encoder's 120 tensors came from {path}; missing there or of another shape, "
        "so left unchanged: conv1.weight; there but not used: fc.bias, fc.weight."
    )


def test_our_own_file_warms_up_whole(tmp_path):
    save_encoder(tmp_path / "e.safetensors", narrow(0), {})
    encoder = narrow(1)
    sentence = load_weights(encoder, tmp_path / "e.safetensors")
    assert sentence.endswith("e.safetensors.")
    assert torch.equal(encoder.conv1.weight, narrow(0).conv1.weight)


class Pickled:
    pass


def test_weights_that_cannot_be_used_get_one_sentence(tmp_path):
    path = tmp_path / "w.pth"
    for content, sentence in [
        ({"other": torch.ones(1)}, "no trained tensor that matches this encoder.*it has other"),
        ([1, 2], "holds no state dict"),
        ({"epoch": 3}, "holds no state dict"),
        (Pickled(), "not a file of plain weights"),
    ]:
        torch.save(content, path)
        with pytest.raises(UserError, match=sentence) as error:
            load_weights(narrow(), path)
        assert "\n" not in str(error.value)
    path.write_bytes(b"text")
    with pytest.raises(UserError, match="not a file of plain weights"):
        load_weights(narrow(), path)
    with pytest.raises(UserError, match="there is no file"):
        load_weights(narrow(), tmp_path / "absent.pth")


CODE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 8), nn.Linear(8, 4)

    def forward(self, images):
        # a comment
        return self.second(torch.relu(self.first(images.flatten(1))))
"""


@pytest.mark.parametrize("given", [False, True])
def test_an_encoder_whose_code_has_changed_since_is_told(given, tmp_path, monkeypatch):
    def now(text):
        module = {"__name__": __name__}
        exec(text, module)
        monkeypatch.setattr(sys.modules[__name__], "Net", module["Net"], raising=False)
        return module["Net"]

    def load(text):
        net = now(text)
        return load_encoder(tmp_path / "e.safetensors", net if given else None)

    net = now(CODE)
    source = give_encoder(net, 1, 8) if given else f"{__name__}:Net"
    save_encoder(tmp_path / "e.safetensors", build_encoder(ModelOptions(encoder=source), 1, 8), {})
    load(CODE.replace("a comment", "another comment"))  # warnings are errors in tests
    with pytest.warns(
        UserWarning, match=r"e\.safetensors was saved with another version of .*Net.* than its"
    ):
        load(CODE.replace("torch.relu", "torch.tanh"))
    with pytest.raises(
        UserError, match=r"do not fit '.*Net.*' as its code is here \(size mismatch for .*first"
    ):
        load(CODE.replace("nn.Linear(64, 8)", "nn.Linear(64, 9)").replace("nn.Linear(8,", "nn.Linear(9,"))
    with pytest.raises(UserError, match=r"as its code is here \(model.encoder = .* cannot process images"):
        load(CODE.replace("nn.Linear(64, 8)", "nn.Linear(63, 8)"))
    with pytest.raises(UserError, match=r"as its code is here \(Missing key.*third"):
        load(
            CODE.replace("# a comment", "").replace(
                "super().__init__()", "super().__init__()\n        self.third = nn.Linear(2, 2)"
            )
        )


CALLS = 0


class Counting(torch.nn.Linear):
    """Code that changes a global value when it runs."""

    def __init__(self):
        super().__init__(64, 4)

    def forward(self, images):
        global CALLS
        CALLS += 1
        return super().forward(images.flatten(1))


def test_what_the_code_of_an_encoder_counts_does_not_change_its_file(tmp_path):
    files = [tmp_path / name for name in ("first", "second")]
    for file in files:
        with seeded_streams(0):
            encoder = build_encoder(ModelOptions(encoder=f"{__name__}:Counting"), 1, 8)
        save_encoder(file, encoder, {})
        encoder(torch.zeros(1, 1, 8, 8))
        load_encoder(file)  # warnings are errors in tests
    assert files[0].read_bytes() == files[1].read_bytes()
    assert CALLS > 2
