"""Bad input gets one sentence and exit code 2: no traceback, no long wait, nothing written."""

import shutil
import time
from pathlib import Path

import pytest
from PIL import Image
from sklearn.datasets import load_digits

from atoll.cli.main import main
from atoll.recipe.table import catalogue
from tests.harness import TINY, run_tiny

SECTIONS = catalogue()["schema"]["properties"]
HUGE = 2**63


def _kinds(schema):
    kinds = {one.get("type") for one in schema.get("anyOf", [schema])}
    return kinds | {"enum"} if any("enum" in one for one in schema.get("anyOf", [schema])) else kinds


def _bad(schema):
    """Values that an option of this schema cannot have."""
    kinds = _kinds(schema)
    if "enum" in kinds:
        return ["'no such word'", "'[/b]'", "5.5"]
    if "integer" in kinds:
        return ["'many'", "1.5", "nan", "true", str(HUGE), f"-{HUGE}", "[]"]
    if "number" in kinds:
        return ["'many'", "nan", "-inf", "true", "{}"]
    if "boolean" in kinds:
        return ["'yes'", "1", "nan"]
    if "array" in kinds:
        return ["5", "'word'", "[nan]", "[[]]", "[true]"]
    return ["5", "nan", "[]"] if "string" in kinds else ["5"]


OPTIONS = [
    f"{section}.{name}={value}"
    for section in ("data", "partition", "model", "train", "evaluation", "engine")
    for name, schema in SECTIONS[section]["properties"].items()
    for value in _bad(schema)
]
NAMED = [
    "train.lr=1e308",
    "train.lr=inf",
    "train.batch_size=9223372036854775808",
    "data.image_size=1000000",
    "data.memory_gib=inf",
    "data.memory_gib=1e308",
    "model.projector_hidden=[10000000000]",
    "engine.threads=1000000",
    "engine.workers=1000000",
    "train.milestones=[nan]",
    "train.rounds=1e3",
    "train.accumulate=9223372036854775807",
    "base=digits-ssd",
    'name=""',
    "name='a\\u001bb'",
    "name='\\n'",
    "seed='x'",
    "seed=99999999999999999999",
    "seed=" + "9" * 5000,
    "no.such.key=1",
    "train=5",
    "=5",
    "train.lr",
    "data.path=" + "[" * 100_000,
    "method.name='[/b]'",
    "method.name=no_module:METHOD",
    "method.terms=['dsr','dsr']",
    "data.source=folder",
    "partition.clients=100000",
]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    return run_tiny(
        tmp_path_factory.mktemp("bad") / "run", "data.limit=40", "partition.clients=2", "train.rounds=1"
    ).folder


def refused(capsys, *arguments):
    """The one sentence that a command says."""
    started, worked = time.monotonic(), time.process_time()
    try:
        code = main([*map(str, arguments)])
    except SystemExit as stop:  # argparse's own
        code = stop.code
    said = capsys.readouterr().err
    assert code == 2, said
    assert "Traceback" not in said
    assert said.splitlines()[-1].startswith(("atoll: ", "atoll "))
    # Wall time says more about what else the machine does; without that, work is all of the wait.
    assert time.process_time() - worked < LIMIT
    assert time.monotonic() - started < 20 * LIMIT
    return said


LIMIT = 10  # seconds


@pytest.mark.parametrize("text", [*OPTIONS, *NAMED])
def test_a_bad_setting(text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    said = refused(capsys, "run", "digits", "--set", *TINY, text)
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_there_are_more_than_300():
    assert len(OPTIONS) + len(NAMED) + len(FILES) >= 300


FILES = {
    "nested.toml": "a = " + "[" * 100_000,
    "empty-brackets.toml": "[[[[",
    "binary.toml": "\0\1\2",
    "circle.toml": 'base = "circle.toml"\n',
    "list.toml": "train = [1, 2]\n",
    "twice.toml": "seed = 1\nseed = 2\n",
    "changed.toml": "# digest 00000000\nseed = 1\n",
    "base.toml": "base = 5\n",
}


@pytest.mark.parametrize("name", FILES)
def test_a_bad_recipe_file(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(FILES[name])
    assert refused(capsys, "run", name).count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "digits", "--out", ""],
        ["run", "digits", "--out", " "],
        ["compare", "digits", "--out", "FILE", "--set", *TINY],
        ["compare", "digits", "--seeds", "0"],
        ["compare", "digits", "digits"],
        ["run", "digits", "--reset-client", "1"],
        ["run", "digits", "--reset-client", "x"],
        ["report", "RUN", "-o", "."],
        ["report", "RUN", "-o", "/no/such\0file"],
        ["report", "RUN", "-o", "FILE/page.html"],
        ["check", "FILE"],
        ["check", "."],
        ["embed", "RUN", "FILE", "-o", "e.npz"],
        ["embed", "FILE", ".", "-o", "e.npz"],
        ["evaluate", "RUN", "--protocol", ""],
        ["evaluate", "RUN", "--protocol", "[/b]"],
        ["evaluate", "RUN", "--protocol", "knn", "--set", "train.lr=1"],
        ["export", "RUN", "--format", "safetensors", "-o", "."],
        ["reproduce", "[/b]"],
        ["data", "FILE"],
        ["egress", "digits", "--images", "-1"],
        [],
    ],
)
def test_bad_arguments(arguments, run_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("FILE").write_text("words")
    refused(capsys, *(str(run_folder) if one == "RUN" else one for one in arguments))


FOREIGN = {
    "metrics.jsonl": ["5\n", "null\n", '{"a": 1}\n', "\0\n", '{"round": 0}\n{"round": 0}\n'],
    "evaluation.json": ["", "{}", "[]", "5", '{"round": "x"}'],
    "recipe.toml": ["", "a = 1\n", "[", "# digest"],
    "partition.json": ["", "{}", "null", '{"clients": 5}'],
    "environment.json": ["5", '{"environments": 5}'],
    "checkpoints/round-abc.safetensors": [""],
    "checkpoints/round-000001.safetensors": [""],
    "encoder.safetensors": ["", "words"],
}


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, texts in FOREIGN.items() for text in texts]
)
def test_a_foreign_file_of_a_run(name, text, run_folder, tmp_path, capsys):
    folder = shutil.copytree(run_folder, tmp_path / "run")
    if name.endswith("000001.safetensors"):  # none is left that can be read
        shutil.rmtree(folder / "checkpoints")
        (folder / "checkpoints").mkdir()
    (folder / name).write_text(text)
    rounds = 1 if name == "encoder.safetensors" else 2
    settings = [*TINY, "data.limit=40", "partition.clients=2", f"train.rounds={rounds}"]
    said = refused(capsys, "run", "digits", "--out", folder, "--resume", "--set", *settings)
    assert said.count("\n") == 1
    refused(capsys, "check", folder)


@pytest.mark.parametrize("title", ["[/x]", "[bold]", ":smile:", "a\\u001b[2Jb"])
def test_a_title_is_never_read_as_markup(title, tmp_path, capsys):
    settings = [*TINY, "data.limit=40", "partition.clients=2", "train.rounds=0", f'title="{title}"']
    assert main(["run", "digits", "--out", str(tmp_path / "run"), "--set", *settings]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert title.replace("\\u001b", "�") in shown.replace("\n", "")


def test_class_folders_are_never_read_as_markup(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # the picture is written there
    images = load_digits().images
    for k, name in enumerate(["[b]", "[red]x", "c\x1b[31m"]):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(8):
            Image.fromarray((images[8 * k + i] * 15).astype("uint8")).save(
                tmp_path / "images" / name / f"{i}.png"
            )
    settings = [
        "data.source=folder",
        f"data.path={tmp_path / 'images'}",
        "partition.kind=iid",
        "partition.clients=2",
    ]
    assert main(["data", "digits", "--set", *TINY, *settings]) == 0
    shown = capsys.readouterr().out
    assert "[b]" in shown
    assert "[red]x" in shown
    assert "c�[31m" in shown


def test_many_classes_fit_a_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # the picture is written there
    monkeypatch.setenv("COLUMNS", "100")
    for k in range(20):
        (tmp_path / "images" / f"class {k}").mkdir(parents=True)
        for i in range(1 + (k == 7)):
            Image.new("L", (8, 8), 10 * k + i).save(tmp_path / "images" / f"class {k}" / f"{i}.png")
    settings = ["data.source=folder", f"data.path={tmp_path / 'images'}", "data.test_fraction=0"]
    partition = ["partition={kind='centralised'}"]
    assert main(["data", "digits", "--set", *TINY, *settings, *partition]) == 0
    shown = capsys.readouterr().out
    (row,) = (line for line in shown.splitlines() if "class 7 2" in line)
    assert [cell.strip() for cell in row.split("│")] == [
        "all",
        "21",
        "0.00",
        "20",
        "class 7 2, class 0 1, class 1 1",
    ]
