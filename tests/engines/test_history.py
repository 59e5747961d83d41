"""What of earlier rounds bounds a round: the latest accepted values."""

import statistics
from pathlib import Path

from atoll.engines.history import History

PROMISES = Path(__file__).parents[2] / "docs/promises.md"


def test_the_latest_thousand_values_that_are_not_0_count_as_the_promises_say():
    history = History()
    values = [(-1) ** k * float(1 + k % 7 if k < 700 else 100 + k) for k in range(1600)]
    for start in range(0, len(values), 50):
        for value in values[start : start + 50]:
            history.add({"loss": value, "distance": 0.0})
        history.close_round()
    assert history.usual("loss") == statistics.median(map(abs, values[-1000:]))
    assert history.least("loss") == min(values[-1000:])
    assert history.usual("distance") is None
    assert "the latest 1,000 accepted values of each kind" in PROMISES.read_text(encoding="utf-8")
