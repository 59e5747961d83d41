import pytest

from atoll.core.errors import UserError
from atoll.data.shifts.options import ShiftOptions
from atoll.recipe.recipe import make_recipe


def test_a_shift_is_named_once():
    with pytest.raises(UserError, match="names a shift twice"):
        ShiftOptions(kinds=("rotation", "style", "rotation"))


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"kinds": ["tilt"]}, "tilt"),
        ({"corruptions": ["gaussian-nose"]}, "gaussian-noise"),
        ({"corruptions": []}, r"shift\.corruptions"),
        ({"severity": 6}, r"shift\.severity"),
    ],
)
def test_a_wrong_value_is_named(table, sentence):
    with pytest.raises(UserError, match=sentence):
        make_recipe({"shift": table})
