"""What an error message says of the names that are known."""

from atoll.core.errors import did_you_mean


def test_of_very_many_names_those_that_contain_the_word_are_listed():
    names = [f"vit_{size}" for size in range(90)] + ["vit_dino", "dino_small"]
    assert did_you_mean("zzz", names[:60]).count(", ") == 59
    assert did_you_mean("DINO", names) == "known: dino_small, vit_dino and 90 others"
    assert did_you_mean("zzz", names).startswith("known: dino_small, vit_0, vit_1, ")
    assert did_you_mean("zzz", names).endswith(" and 82 others")


def test_capitals_hide_no_name():
    assert did_you_mean("SSD", ["fedu", "ssd", "ssdd"]) == "did you mean 'ssd'?"
