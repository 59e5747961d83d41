"""The command `atoll check`."""

from atoll.cli.main import main
from atoll.commands.check import check_run
from atoll.commands.neighbours import find_neighbours
from tests.harness import run_tiny


def test_the_check_names_what_is_damaged(tmp_path, capsys):
    folder = run_tiny(tmp_path / "run", "data.limit=40", "partition.clients=2", "train.rounds=1").folder
    assert main(["check", str(folder)]) == 0
    assert capsys.readouterr().out.endswith("files read, 0 damaged or missing\n")
    (folder / "partition.json").write_text("{}")
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
        assert check_run(run).damaged, path.name
        path.write_bytes(whole)
    assert not check_run(run).damaged
