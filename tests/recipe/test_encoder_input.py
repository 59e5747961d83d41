import pytest
from torch import nn

from atoll.core.errors import UserError
from atoll.recipe.recipe import give, load_recipe, make_recipe, read_recipe

pytest.importorskip("timm", reason="the extra atoll[timm] is not installed")

VIT = {"model": {"encoder": "timm:test_vit"}}  # 160 pixels, mean and std 0.5


def with_size(table):
    return {**table, "data": {"image_size": 16, "channels": 1}}


def test_the_configuration_lies_under_the_recipe():
    recipe = make_recipe(VIT)
    assert (recipe.data.image_size, recipe.views.mean, recipe.views.std) == (160, (0.5,) * 3, (0.5,) * 3)
    other = make_recipe({**VIT, "data": {"image_size": 32}, "views": {"mean": [0.1]}})
    assert (other.data.image_size, other.views.mean, other.views.std) == (32, (0.1,), (0.5,) * 3)
    assert make_recipe({**VIT, "views": {"size": 48}}).views.size == 48
    grey = make_recipe({**VIT, "data": {"channels": 1}})
    assert grey.views.mean == (0.5,)


def test_a_complete_recipe_reads_back_the_same():
    recipe = make_recipe({**VIT, "views": {"preset": "none"}}).completed()
    assert read_recipe(recipe.to_toml()) == recipe


def test_atolls_own_encoders_are_as_they_were():
    assert make_recipe({"model": {"encoder": "resnet18"}}).views.mean is None


def test_what_cannot_be_found_out_is_asked_for_in_one_sentence():
    flat = nn.Flatten()
    with pytest.raises(UserError, match=r"set data.image_size and views.mean and views.std, such as"):
        give({"data": {"channels": 1}}, flat)
    with pytest.raises(UserError, match=r"set views.mean and views.std, such as"):
        give(with_size({}), flat)
    with pytest.raises(
        UserError, match=r'set views.std, such as \{"views": \{"std": \[0.5\]\}\} in the recipe$'
    ):
        give({**with_size({}), "views": {"mean": [0.5]}}, flat)
    recipe = give({**with_size({}), "views": {"mean": [0.5], "std": [0.5]}}, flat)
    assert recipe.model.encoder.startswith("object:Flatten#")
    assert give(with_size({"views": {"preset": "fedx"}}), flat).views.mean is None  # the preset has one


def test_a_command_is_told_to_set_what_is_missing_only():
    """The example named an image size to recipes that have one."""
    with pytest.raises(UserError, match=r"such as --set views.mean=\[0.5\] views.std=\[0.5\]$"):
        make_recipe(with_size({"model": {"encoder": "torch.nn:Flatten"}}))


def test_an_option_of_another_encoder_is_ignored_with_a_warning():
    with pytest.warns(
        UserWarning, match="model.width does not apply to the encoder 'timm:test_vit' and is ignored"
    ):
        recipe = make_recipe({"model": {**VIT["model"], "width": 8}})
    assert recipe.model.width is None


def test_a_warning_calls_a_given_encoder_by_its_authors_name():
    known = {"views": {"mean": [0.5], "std": [0.5]}, "model": {"stem": "standard"}}
    with pytest.warns(UserWarning, match="model.stem does not apply to the encoder Flatten and is ignored"):
        give(with_size(known), nn.Flatten())


def test_a_recipe_whose_method_is_not_imported_has_the_encoders_configuration_too(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'base = "digits-ssd"\n[method]\nname = "mine:METHOD"\n[model]\nencoder = "timm:test_vit"\n'
    )
    (tmp_path / "mine.py").write_text("from atoll.methods.ssd import METHOD\n")
    with pytest.warns(UserWarning, match="does not apply to the encoder 'timm:test_vit' and is ignored"):
        recipe, composed = load_recipe(path, own_code=False), load_recipe(path)
    assert (recipe.data, recipe.views, recipe.model) == (composed.data, composed.views, composed.model)


def test_an_encoder_of_code_that_is_not_imported_loses_the_options_of_others(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('base = "digits-ssd"\n[model]\nencoder = "nowhere:Net"\n')
    with pytest.warns(UserWarning, match="does not apply to the encoder 'nowhere:Net' and is ignored"):
        recipe = load_recipe(path, own_code=False)
    assert recipe.model.stem == "cifar"


def test_a_recipe_whose_code_is_not_imported_names_no_file_elsewhere(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('base = "digits-ssd"\nname = "/../../elsewhere"\n[method]\nname = "nowhere:METHOD"\n')
    with pytest.raises(UserError, match="cannot name a run's folder"):
        load_recipe(path, own_code=False)


def test_a_size_that_only_code_that_is_not_imported_knows_is_asked_for(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[model]\nencoder = "nowhere:Net"\n')
    with pytest.raises(UserError, match=r"nowhere:Net.*set data.image_size, or .* add --run-code"):
        load_recipe(path, own_code=False)
    assert load_recipe(path, ["data.image_size=48"], own_code=False).data.image_size == 48
