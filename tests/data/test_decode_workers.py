import os
import signal

import numpy as np
import pytest
import torch
from PIL import Image

from atoll.core.errors import RunError, UserError
from atoll.data.cache import StreamedPixels
from atoll.data.decode import Decoding
from atoll.data.decode_workers import DecodeWorkers, is_streamed
from atoll.data.images import SelectedPixels, StoredPixels
from atoll.data.records import FileRecords
from tests.harness import remains, run_tiny
from tests.trees import same


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """JPEGs of noise in two classes."""
    root, draws = tmp_path_factory.mktemp("jpeg"), np.random.default_rng(0)
    for i in range(48):
        (root / f"class{i % 2}").mkdir(exist_ok=True)
        pixels = draws.integers(0, 256, (12, 15, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / f"class{i % 2}" / f"{i:02}.jpg", quality=90)
    return root


def streamed(folder):
    names = tuple(sorted(path.relative_to(folder).as_posix() for path in folder.glob("*/*.jpg")))
    return StreamedPixels(FileRecords(folder, names), Decoding(8, 3))


def plan(seed=0):
    draws = torch.Generator().manual_seed(seed)
    return [torch.randint(48, (size,), generator=draws) for size in (5, 1, 7, 5, 5, 3)]


@pytest.fixture(scope="module")
def workers(folder):
    return DecodeWorkers(streamed(folder), 2)


def test_batches_come_in_order_whatever_the_number_of_processes(folder, workers):
    expected = [streamed(folder).gather(rows) for rows in plan()]
    torch.manual_seed(4)
    stream = torch.random.get_rng_state()
    for reader in (
        DecodeWorkers(streamed(folder), 0),
        workers,
        workers,
    ):  # the processes stay for the next client
        found = list(reader.read(iter(plan())))
        assert len(found) == len(expected)
        assert all(map(torch.equal, found, expected))
    assert torch.equal(torch.random.get_rng_state(), stream)


def test_an_iteration_that_is_left_does_not_disturb_the_next(folder, workers):
    first = workers.read(plan())
    next(first)
    beside = next(workers.read(plan(1)))  # a second reader at the same time decodes for itself
    assert torch.equal(beside, streamed(folder).gather(plan(1)[0]))
    first.close()
    assert all(map(torch.equal, workers.read(plan(2)), map(streamed(folder).gather, plan(2))))


def test_an_image_that_vanished_is_named_in_a_sentence(folder, tmp_path):
    (tmp_path / "gone").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "gone/0.png")
    pixels = StreamedPixels(FileRecords(tmp_path, ("gone/0.png",)), Decoding(8, 3))
    reader = DecodeWorkers(pixels, 1)
    assert next(reader.read([torch.tensor([0])])).shape == (1, 3, 8, 8)
    (tmp_path / "gone/0.png").write_bytes(b"not an image")
    with pytest.raises(UserError, match=r"gone/0.png can no longer be decoded .*has the source changed"):
        list(reader.read([torch.tensor([0])]))


def test_a_process_that_was_killed_is_reported(folder):
    reader = DecodeWorkers(streamed(folder), 1)
    list(reader.read(plan()))
    (process,) = reader._loader._iterator._workers
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with pytest.raises(RunError, match=r"a process that decodes images was killed by signal 9 \(SIGKILL\)"):
        list(reader.read(plan()))


def test_only_streamed_images_need_processes(folder):
    stored = StoredPixels(torch.zeros(3, 1, 2, 2, dtype=torch.uint8))
    assert not is_streamed(SelectedPixels(stored, torch.arange(2)))
    assert is_streamed(SelectedPixels(streamed(folder), torch.arange(2)))


@pytest.mark.slow
def test_a_run_ends_with_the_same_bytes(folder, tmp_path):
    settings = (
        "data.source=folder", f"data.path={folder}", "data.channels=3", "data.memory_gib=1e-7", "data.limit=36",
        "partition.clients=2", "views.mean=[0]", "views.std=[1]", "method.name=fed_simclr", "train.batch_size=6",
        "method.terms=['featarc_alignment']", "evaluation.knn_k=3",
    )  # fmt: skip
    plain = remains(run_tiny(tmp_path / "plain", *settings))
    assert same(remains(run_tiny(tmp_path / "decoders", *settings, "engine.decoders=2")), plain)
    both = run_tiny(tmp_path / "both", *settings, "engine.decoders=1", "engine.workers=2")
    assert same(remains(both), plain)
