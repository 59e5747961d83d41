from __future__ import annotations

import pytest

from atoll.core.errors import UserError
from atoll.evaluation.detection.options import DetectionOptions


def test_the_defaults_are_detectrons_schedule() -> None:
    options = DetectionOptions(warmup=0)
    rates = [options.rate(step, 90_000) for step in (0, 59_999, 60_000, 79_999, 80_000, 89_999)]
    assert rates == pytest.approx([0.02, 0.02, 0.002, 0.002, 0.0002, 0.0002])


def test_the_cosine_falls_to_zero_and_the_warmup_rises_to_the_rate() -> None:
    cosine = DetectionOptions(lr=2.0, schedule="cosine", warmup=0)
    assert [cosine.rate(step, 4) for step in range(5)] == pytest.approx([2, 1 + 0.5**0.5, 1, 1 - 0.5**0.5, 0])
    rising = DetectionOptions(lr=2.0, schedule="constant", warmup=0.5)
    assert [rising.rate(step, 8) for step in range(5)] == [0.5, 1.0, 1.5, 2.0, 2.0]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"size": 400, "max_size": 300}, "max_size = 300, .* is below size = 400"),
        ({"device": "tpu"}, "device is 'tpu'; use auto, cpu or cuda"),
        ({"epochs": 0}, "epochs is 0; it must be above 0"),
        ({"warmup": 1.0}, "warmup is 1.0"),
    ],
)
def test_options_that_do_not_fit_are_refused(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        DetectionOptions(**settings)
