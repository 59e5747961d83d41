"""The modules that a recipe names: which of them a site's policy lets the site import."""

from __future__ import annotations

import hashlib
import importlib.util
import py_compile
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="the extra atoll[flower] is not installed")

from atoll.core.errors import UserError
from atoll.engines.flower import policy as policy_file
from atoll.engines.flower.policy import Policy, PolicyError
from atoll.engines.flower.site_registry import SiteRegistry
from tests.engines.flower.grid import FakeGrid
from tests.engines.flower.site_runs import site


@pytest.fixture
def marked(tmp_path, monkeypatch):
    """A module that leaves a mark when it is imported."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "marking.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\n")
    return tmp_path


def test_an_encoder_of_a_module_is_a_module_too(marked):
    with pytest.raises(PolicyError, match="names the module 'marking'"):
        Policy().check_text('[model]\nencoder = "marking:Net"\n')
    for encoder in ("resnet18", "timm:test_resnet", "hf:vit"):
        Policy().check_text(f'[model]\nencoder = "{encoder}"\n')
    assert not (marked / "mark").exists()


def test_a_transform_of_a_module_is_a_module_too(marked):
    with pytest.raises(PolicyError, match="names the module 'marking'"):
        Policy().check_text('[views]\ntransform = "marking:augment"\n')
    Policy().check_text('[views]\npreset = "simclr"\n')


@pytest.mark.parametrize("key", ["during", "at_end"])
def test_a_protocol_of_a_module_is_a_module_too(marked, key):
    with pytest.raises(PolicyError, match="names the module 'marking'"):
        Policy().check_text(f'[evaluation]\n{key} = ["knn", "marking:measure"]\n')
    Policy().check_text(f'[evaluation]\n{key} = ["knn", "geometry"]\n')
    assert not (marked / "mark").exists()


@pytest.mark.parametrize("section", ["data", "options.em_inspector.data"])
def test_a_dataset_of_a_module_is_a_module_too(marked, section):
    with pytest.raises(PolicyError, match="names the module 'marking'"):
        Policy().check_text(f'[{section}]\nsource = "marking:IMAGES"\n')
    Policy().check_text(f'[{section}]\nsource = "digits"\n')
    assert not (marked / "mark").exists()


def recipe_with(module):
    return f'[method]\nname = "{module}:Mine"\nterms = ["dsr"]\n'


@pytest.mark.parametrize(
    ("modules", "name", "words"),
    [
        ({}, "marking", "names the module 'marking', which the site's policy does not list"),
        ({"marking": "00"}, "marking", "is not the one that the site's policy lists"),
        ({"marking": "installed"}, "marking", "'marking' is not installed at the site"),
        ({"absent": "00"}, "absent", "'absent', which the recipe names, is not at the site"),
        ({"torch.nn": "00"}, "torch.nn", "can list it as installed only"),
        ({"torch": "00"}, "torch", "can list it as installed only"),
        ({"marking.inner": "00"}, "marking.inner", "can list it as installed only"),
        ({"json": "installed"}, "json", "'json' is not installed at the site"),
        ({"folder": "installed"}, "folder", "'folder', which the recipe names, is not at the site"),
        ({"..": "00"}, "..", "cannot be the name of a module"),
        ({"marking.no-name": "00"}, "marking.no-name", "cannot be the name of a module"),
    ],
)
def test_a_module_that_is_not_allowed_is_named_and_not_imported(marked, modules, name, words):
    (marked / "folder").mkdir()
    with pytest.raises(PolicyError) as error:
        Policy(modules=modules).check_text(recipe_with(name))
    assert words in str(error.value)
    assert not (marked / "mark").exists()
    assert "marking" not in sys.modules


@pytest.mark.parametrize("name", ["aaa", "zzz"])
def test_every_module_of_a_recipe_is_checked(marked, name):
    """The modules are not equally early in the alphabet and in the recipe."""
    (marked / f"{name}.py").write_text("")
    digest = hashlib.sha256(b"").hexdigest()
    text = recipe_with(name) + '[model]\nencoder = "marking:Net"\n'
    with pytest.raises(PolicyError, match="names the module 'marking'"):
        Policy(modules={name: digest}).check_text(text)


def test_bytecode_beside_an_allowed_module_is_not_imported(marked):
    file, told = marked / "marking.py", marked / "told.py"
    told.write_text("hidden = True\n")
    cached = importlib.util.cache_from_source(str(file))
    py_compile.compile(str(told), cached, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    Policy(modules={"marking": hashlib.sha256(file.read_bytes()).hexdigest()}).check_text(
        recipe_with("marking")
    )
    try:
        assert not hasattr(importlib.import_module("marking"), "hidden")
    finally:
        sys.modules.pop("marking", None)
    assert (marked / "mark").exists()


def test_an_allowed_module_passes_without_an_import(marked):
    digest = hashlib.sha256((marked / "marking.py").read_bytes()).hexdigest()
    Policy(modules={"marking": digest}).check_text(recipe_with("marking"))
    Policy(modules={"torch": "installed"}).check_text(recipe_with("torch"))
    assert not (marked / "mark").exists()


def test_a_module_of_a_package_is_checked_without_an_import_of_the_package(marked, monkeypatch):
    """Installed is what is in one of the two folders of packages, which some systems keep apart."""
    package = marked / "platform" / "marked_package"
    package.mkdir(parents=True)
    (marked / "marking.py").rename(package / "__init__.py")
    (package / "inner.py").write_text("")
    monkeypatch.syspath_prepend(marked / "platform")
    policy = Policy(modules={"marked_package.inner": "installed"})
    with pytest.raises(PolicyError, match="'marked_package' is not installed at the site"):
        policy.check_text(recipe_with("marked_package.inner"))
    folders = {"purelib": marked / "pure", "platlib": marked / "platform"}
    monkeypatch.setattr(policy_file, "sysconfig", SimpleNamespace(get_path=folders.__getitem__))
    policy.check_text(recipe_with("marked_package.inner"))
    assert not (marked / "mark").exists()


def test_every_digit_of_a_hash_counts(marked):
    digest = hashlib.sha256((marked / "marking.py").read_bytes()).hexdigest()
    for k in (0, 63):
        other = digest[:k] + ("1" if digest[k] == "0" else "0") + digest[k + 1 :]
        with pytest.raises(PolicyError, match="is not the one that the site's policy lists"):
            Policy(modules={"marking": other}).check_text(recipe_with("marking"))


def test_a_recipe_whose_modules_cannot_be_read_is_refused():
    with pytest.raises(PolicyError, match="the coordinator's recipe is not valid TOML"):
        Policy().check_text("[method")


def test_a_site_without_a_policy_imports_no_module_of_a_recipe(place, marked):
    grid = FakeGrid({13: site(13, "west", place)})
    with pytest.raises(UserError, match="names the module 'marking'"):
        SiteRegistry(grid, recipe_with("marking"), 1).gather(1, 0.5)
    assert not (marked / "mark").exists()
