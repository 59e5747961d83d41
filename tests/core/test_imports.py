import re

import pytest

from atoll.core.errors import UserError
from atoll.core.imports import folders_of, import_attribute, import_function, search
from atoll.recipe.recipe import names_of_code


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    return tmp_path


def test_an_attribute_of_a_file_in_the_working_folder_is_imported(folder):
    (folder / "imported_here.py").write_text("answer = 42\n")
    assert import_attribute("imported_here:answer", "number") == 42


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "encoder 'named_{}:net': no module 'named_{}' in this folder"),
        ("other = 1\n", "encoder 'named_{}:net': module 'named_{}' has no 'net'; known: other$"),
        ("Net = 1\n_net = 2\n", "module 'named_{}' has no 'net'; did you mean 'Net'\\?$"),
        ("", "module 'named_{}' has no 'net'; it defines nothing$"),
        ("def net(:\n", r"cannot be imported: SyntaxError: .*named_{}\.py, line 1"),
        ("1 / 0\n", r"cannot be imported: ZeroDivisionError: .*named_{}\.py, line 1"),
        ("import json\n\njson.loads('{')\n", r"cannot be imported: JSONDecodeError: .*named_{}\.py, line 3"),
        ("import named_nothing\n", "no module 'named_nothing'"),
    ],
)
def test_what_cannot_be_imported_gets_a_sentence(folder, text, sentence, request):
    number = abs(hash(request.node.name))  # modules stay imported for the whole process
    if text is not None:
        (folder / f"named_{number}.py").write_text(text)
    with pytest.raises(UserError, match=sentence.replace("{}", str(number))):
        import_attribute(f"named_{number}:net", "encoder")


def test_a_class_in_the_place_of_its_object_is_told_so(folder):
    (folder / "named_classes.py").write_text("class Net:\n    pass\n")
    with pytest.raises(
        UserError, match=r"^protocol 'named_classes:Net' is the class Net; .* object of it, Net\(…\)"
    ):
        import_function("named_classes:Net", "protocol")


def test_the_folders_of_names_are_those_beside_pythons_path(folder):
    (folder / "code").mkdir()
    (folder / "code/placed.py").touch()
    names = ["placed:net", "placed:other", "torch:pi", "nowhere_at_all:net"]
    search(names, [folder / "code"])
    assert folders_of(names) == [str((folder / "code").resolve())]
    search(names, ())
    assert folders_of(names) == []


@pytest.mark.parametrize("module", ["mine.py", "./mine.py", "code/mine.py", "../mine", "/code/mine", ".mine"])
def test_a_file_in_the_place_of_a_module_is_told_the_modules_name(folder, module):
    (folder / "mine.py").write_text("net = 1\n")
    with pytest.raises(
        UserError, match="a module is named without folder and suffix, such as mine:net; it is"
    ):
        import_attribute(f"{module}:net", "encoder")


@pytest.mark.parametrize(
    ("table", "setting"),
    [
        ({"method": {"aggregation": "gone_away:Mine"}}, "method.aggregation=gone_away:Mine"),
        ({"method": {"terms": ["gone_away:Mine", "dsr"]}}, "\"method.terms=['gone_away:Mine', 'dsr']\""),
        ({"model": {"encoder": "gone_away:Mine"}}, "model.encoder=gone_away:Mine"),
        ({"views": {"transform": "gone_away:Mine"}}, "views.transform=gone_away:Mine"),
        ({"data": {"source": "gone_away:Mine"}}, "data.source=gone_away:Mine"),
        (
            {"options": {"em_inspector": {"data": {"source": "gone_away:Mine"}}, "fedca": 1}},
            "options.em_inspector.data.source=gone_away:Mine",
        ),
    ],
)
def test_missing_code_is_told_the_setting_that_names_it(folder, table, setting):
    search(["gone_away:Mine"], [folder], settings=names_of_code(table))
    with pytest.raises(UserError, match=rf"in the command, such as --set {re.escape(setting)}$"):
        import_attribute("gone_away:Mine", "the recipe's code")
