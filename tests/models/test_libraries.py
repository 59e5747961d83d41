"""The forms of configuration; `test_external.py` compares the networks with their libraries."""

from atoll.models.libraries import InputConfig, read_config


def test_a_configuration_is_read_as_far_as_it_goes():
    assert read_config({"input_size": (3, 24, 32), "mean": [1, 2, 3], "std": (4, 5, 6)}) == InputConfig(
        32, (1.0, 2.0, 3.0), (4.0, 5.0, 6.0)
    )
    assert read_config({"mean": None}) == InputConfig()
