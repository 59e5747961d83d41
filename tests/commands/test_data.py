"""`atoll data`: the table and the picture of a recipe's clients; a run keeps their samples for the report."""

from xml.etree import ElementTree

import pytest
import torch

from atoll.cli.main import main
from atoll.commands.data import load_partition
from atoll.core.errors import UserError
from atoll.core.tree import load
from atoll.engines.federation import Federation
from atoll.report import write_report
from tests.harness import TINY, run_tiny, tiny

SHIFT = ("shift.kinds=['rotation','corruption']", "shift.severity=2")


def test_the_command_prints_and_draws(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert (
        main(
            [
                "data",
                "digits",
                "--set",
                *TINY,
                *SHIFT,
                "partition.kind=dirichlet",
                "partition.features=untrained",
            ]
        )
        == 0
    )
    text = capsys.readouterr().out
    for word in ("distance", "shift", "gaussian-noise 2", "split by 4 feature clusters", "data-digits.svg"):
        assert word in text
    picture = (tmp_path / "data-digits.svg").read_text()
    ElementTree.fromstring(picture)
    assert "the 4 feature clusters that are split" in picture
    assert "rotated by 270°" in picture


def test_the_picture_goes_where_it_is_told(tmp_path, capsys):
    out = tmp_path / "mine.svg"
    assert main(["data", "digits", "--set", *TINY, "-o", str(out)]) == 0
    assert out.is_file()
    assert main(["data", "digits", "--set", *TINY, "-o", str(tmp_path / "mine.png")]) == 2
    assert "does not end in .svg" in capsys.readouterr().err


def test_a_run_keeps_samples_of_what_its_clients_train_on_and_the_report_shows_them(tmp_path):
    run = run_tiny(tmp_path / "run", *SHIFT, "evaluation.map_points=20")
    samples = load(run.folder / "clients.safetensors")
    federation = Federation(tiny(*SHIFT))
    indices = federation.partition.clients[1]
    expected = federation.images.images.gather(indices[torch.arange(8) * len(indices) // 8])
    assert torch.equal(samples["pictures"][1], expected)
    page = write_report([run.folder], tmp_path / "page.html").read_text()
    assert "Sample images as the clients have them" in page
    assert page.count('alt="images of client') == 4
    assert "rotated by 90°" in page
    without = run_tiny(tmp_path / "without", *SHIFT)
    assert not (without.folder / "clients.safetensors").exists()


@pytest.mark.parametrize("kind", ["dirichlet", "shards"])
def test_clients_distances_have_the_mean_that_is_printed(kind):
    partition = Federation(tiny(f"partition.kind={kind}", "partition.classes_per_client=3")).partition
    assert sum(partition.distances()) / len(partition) == pytest.approx(partition.label_distance, rel=1e-5)


def test_a_partition_that_no_run_trains_on_is_shown_with_a_warning(tmp_path, capsys):
    small = ("data.limit=4", "data.test_fraction=0.5", "partition.kind=iid", "partition.clients=4")
    with pytest.warns(
        UserWarning, match=r"a run refuses this partition: 4 clients are too small to train: .* use"
    ):
        load_partition(tiny(*small))
    with pytest.raises(UserError, match=r"^4 clients are too small to train"):
        Federation(tiny(*small))
