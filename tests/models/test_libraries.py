"""The forms of configuration; `test_external.py` compares the networks with their libraries."""

import pytest

from atoll.models.libraries import InputConfig, hugging_face_input, read_config


def test_a_configuration_is_read_as_far_as_it_goes():
    assert read_config({"input_size": (3, 24, 32), "mean": [1, 2, 3], "std": (4, 5, 6)}) == InputConfig(
        32, (1.0, 2.0, 3.0), (4.0, 5.0, 6.0)
    )
    assert read_config({"mean": None}) == InputConfig()


def test_a_kind_of_model_is_not_looked_up_on_the_hub(monkeypatch):
    """The hub was asked for a repository called vit; without a network, this took half a minute."""
    base = pytest.importorskip("transformers.image_processing_base", reason="atoll[hf] is not installed")

    def asked(name, **_):
        raise AssertionError(f"asked the hub for {name}")

    monkeypatch.setattr(base.ImageProcessingMixin, "get_image_processor_dict", asked)
    assert hugging_face_input("hf:vit") == InputConfig(224)
