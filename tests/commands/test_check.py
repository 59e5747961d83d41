"""The command `atoll check`."""

import pytest
from torch import nn

import atoll
from atoll.cli.main import main
from atoll.commands.check import check_run
from atoll.commands.neighbours import find_neighbours
from tests.harness import run_tiny, tiny


def test_the_check_names_what_is_damaged(tmp_path, capsys):
    folder = run_tiny(tmp_path / "run", "data.limit=40", "partition.clients=2", "train.rounds=1").folder
    assert main(["check", str(folder)]) == 0
    assert capsys.readouterr().out.endswith("files read, 0 damaged or missing\n")
    (folder / "partition.json").write_text("{}")
    assert main(["check", str(folder)]) == 2
    said = "partition.json is damaged (it does not describe a partition: KeyError('clients')); delete it"
    assert f"{folder}/{said}" in capsys.readouterr().err
    (folder / "encoder.safetensors").unlink()
    assert main(["check", str(folder)]) == 2
    errors = capsys.readouterr().err
    assert "partition" in errors
    assert "encoder.safetensors is missing; resume the run" in errors
    assert main(["check", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_a_flipped_bit_of_any_kind_of_file_is_found(tmp_path):
    run = run_tiny(
        tmp_path / "run",
        "evaluation.map_points=20",
        "train.keep_optimizer=true",
        "train.keep_local_models=[1]",
    )
    find_neighbours(run, queries=2, k=2)
    files = [
        path for path in run.folder.rglob("*") if path.is_file() and path.name not in (".lock", "report.html")
    ]
    assert check_run(run).files == len(files) >= 20
    for path in files:
        whole = path.read_bytes()
        middle = len(whole) // 2
        path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 4]) + whole[middle + 1 :])
        assert len(check_run(run).damaged) == 1, path.name  # also a file that others are read with
        path.write_bytes(whole)
    assert not check_run(run).damaged


def test_what_a_finished_run_lacks_is_missing_and_resuming_writes_it_again(tmp_path):
    settings = ("data.limit=40", "partition.clients=2", "train.rounds=1")
    run = run_tiny(tmp_path / "run", *settings)
    whole = {name: (run.folder / name).read_bytes() for name in ("partition.json", "encoder.safetensors")}
    for name in (*whole, "evaluation.json"):
        (run.folder / name).unlink()
        assert [
            sentence.partition(" is missing; resume the run")[0] for sentence in check_run(run).damaged
        ] == [str(run.folder / name)]
        run_tiny(run.folder, *settings, resume=True)
        assert not check_run(run).damaged
    assert {name: (run.folder / name).read_bytes() for name in whole} == whole
    (run.folder / "metrics.jsonl").unlink()
    (found,) = check_run(run).damaged
    assert "metrics.jsonl is missing; restore it from a copy, or go on without the curves" in found


def test_metrics_without_their_last_lines_are_named(tmp_path):
    settings = ("data.limit=40", "partition.clients=2")
    run = run_tiny(tmp_path / "run", *settings, "train.rounds=2")
    path, lines = run.folder / "metrics.jsonl", (run.folder / "metrics.jsonl").read_bytes().splitlines(True)
    assert len(lines) == 3
    for count, sentence in {2: "ends at round 1 of 2", 1: "ends at round 0 of 2"}.items():
        path.write_bytes(b"".join(lines[:count]))
        remedy = "restore it from a copy, or go on without its last lines"
        assert check_run(run).damaged == [f"{path} {sentence}; {remedy}"]
    path.write_bytes(b"".join(lines[:2]))
    (run.folder / "evaluation.json").unlink()
    assert (
        f"{path} ends at round 1 of 2; resume the run, which writes the last line again"
        in check_run(run).damaged
    )
    run_tiny(run.folder, *settings, "train.rounds=2", resume=True)
    assert path.read_bytes().splitlines(True)[:2] == lines[:2]
    assert not check_run(run).damaged


@pytest.mark.filterwarnings("ignore:model.* does not apply")
def test_an_encoder_whose_code_is_not_here_is_not_damaged(tmp_path):
    known = ("views.mean=[0.5]", "views.std=[0.5]")
    recipe = tiny("data.limit=40", "partition.clients=2", "train.rounds=1", *known)
    run = atoll.simulate(
        recipe, tmp_path / "run", encoder=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 8))
    )
    assert not check_run(run).damaged
    damaged = bytearray(run.encoder_path.read_bytes())
    damaged[-3] ^= 1
    run.encoder_path.write_bytes(damaged)
    assert "encoder.safetensors" in check_run(run).damaged[0]
