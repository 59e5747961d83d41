"""The duration of a client's steps, with their share of the passes that make the batches."""

import statistics

import pytest
import torch

from atoll.commands import stopwatch
from atoll.data.batch import Batch


@pytest.mark.parametrize(("in_a_pass", "epochs"), [(1, 2), (4, 2), (16, 1), (16, 0)])
def test_a_step_includes_its_share_of_a_pass_as_large_as_in_a_round(in_a_pass, epochs, monkeypatch):
    """A step on 10 images takes 2 s, on 6 images 1 s; a pass takes 3 s, 0.5 s an image, and at first 90 s more."""
    clock = [100.0]
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: clock[0])
    passes = []

    class Data:
        num_samples = 26

        def batches_in_a_pass(self, images):
            assert images == ("view1",)
            return in_a_pass

        def batches(self, round, epochs, images):
            assert (round, images) == (3, ("view1",))
            sizes = [10, 10, 6] * epochs
            for i, size in enumerate(sizes):
                if i % in_a_pass == 0:
                    clock[0] += 3 + 0.5 * sum(sizes[i : i + in_a_pass]) + (0 if passes else 90)
                    passes.append(sum(sizes[i : i + in_a_pass]))
                yield Batch(torch.arange(size), {}, None)

    watch = stopwatch.Stopwatch(3, torch.device("cpu"))
    data = watch.over(Data(), epochs)
    assert data.num_samples == 26
    steps = 0

    def train():
        nonlocal steps
        for batch in data.batches(3, 20, ("view1",)):
            clock[0] += 2 if len(batch.indices) == 10 else 1
            steps += 1
            watch(len(batch.indices))

    with pytest.raises(stopwatch.Enough):
        train()
    assert steps == 4  # three full batches: no more steps for the sake of whole passes
    assert watch.making == pytest.approx([0.5 + 3 / images for images in passes[1:]])
    assert passes[1] == {1: 10, 4: 36, 16: 26}[in_a_pass]
    for choose in (min, statistics.median):
        assert watch.step_seconds(1, choose) == pytest.approx(2 + 10 * choose(watch.making))
