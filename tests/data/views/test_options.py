"""The settings of views: the papers' presets, and what is refused with a sentence."""

import dataclasses

import pytest

from atoll.core.errors import UserError
from atoll.data.views.views import PRESETS, ViewOptions, ViewSettings, make_views


# methods.md: the table of 1.1, sections 1.7, 2.1, 2.6 and 7.
@pytest.mark.parametrize(
    ("preset", "crop", "colour", "blur", "normalised"),
    [
        ("simclr", (0.08, 1.0), (0.4, 0.4, 0.4, 0.1), 0.0, False),
        ("dec-ssl", (0.08, 1.0), (0.4, 0.4, 0.4, 0.1), 0.0, True),
        ("l-dawa", (0.2, 1.0), (0.4, 0.4, 0.4, 0.1), 0.5, True),
        ("easyfl", (0.08, 1.0), (0.8, 0.8, 0.8, 0.2), 0.0, False),
        ("ssd", (0.08, 1.0), (0.8, 0.8, 0.8, 0.2), 0.0, False),
        ("fedu2", (0.2, 1.0), (0.8, 0.8, 0.8, 0.2), 0.0, False),
        ("orchestra", (0.5, 1.0), (0.4, 0.4, 0.2, 0.1), 0.5, True),
        ("fedx", None, (0.0, 0.0, 0.0, 0.0), 0.0, True),
        ("mae", None, (0.0, 0.0, 0.0, 0.0), 0.0, True),
        ("finetune", (0.64, 1.0), (0.0, 0.0, 0.0, 0.0), 0.0, False),
    ],
)
def test_presets_are_the_papers(preset, crop, colour, blur, normalised):
    chosen = ViewOptions(preset).settings()
    assert chosen.crop_scale == crop
    assert (chosen.brightness, chosen.contrast, chosen.saturation, chosen.hue) == colour
    assert chosen.blur == blur
    assert (chosen.std != (1.0,)) == normalised
    assert chosen.jitter == (0.8 if any(colour) else 0.0)
    assert chosen.grayscale == (0.2 if any(colour) else 0.0)
    assert chosen.flip == (0.0 if preset == "mae" else 0.5)


def test_digits_are_never_mirrored():
    assert ViewOptions("digits").settings().flip == 0


def test_simclr_kernel_is_a_tenth_of_the_image():
    # 224 → 23, the kernel that SimCLR's code uses there.
    sizes = {size: make_views(ViewOptions("simclr-imagenet"), size, 3).blur_kernel for size in (32, 96, 224)}
    assert sizes == {32: 3, 96: 9, 224: 23}


def test_options_change_the_preset():
    options = ViewOptions("ssd", crop_scale=[0.2, 1.0], hue=0.0)
    assert options.crop_scale == (0.2, 1.0)
    expected = dataclasses.replace(PRESETS["ssd"], crop_scale=(0.2, 1.0), hue=0.0)
    assert options.settings() == expected


def test_every_setting_is_an_option():
    names = {each.name for each in dataclasses.fields(ViewSettings)}
    assert names | {"preset", "size", "local_size", "transform"} == {
        each.name for each in dataclasses.fields(ViewOptions)
    }


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"preset": "simlcr"}, "views.preset is 'simlcr'; did you mean 'simclr'?"),
        ({"flip": 1.5}, r"views.flip is 1.5; it must be between 0 and 1 \(a probability\)"),
        ({"flip": float("nan")}, "views.flip is nan"),
        ({"hue": 0.6}, "views.hue is 0.6; it must be between 0 and 0.5"),
        ({"contrast": -1.0}, "views.contrast is -1.0; it must be at least 0"),
        ({"crop_scale": (0.5, 0.2)}, "views.crop_scale"),
        ({"crop_scale": (0.5, 2.0)}, "views.crop_scale is .* high <= 1"),
        ({"crop_ratio": (0.0, 1.0)}, "views.crop_ratio"),
        ({"blur_sigma": (1.0,)}, "views.blur_sigma"),
        (
            {"interpolation": "nearest"},
            "views.interpolation is 'nearest'; known: bicubic, bilinear",
        ),
        ({"pad_crop": -1}, "views.pad_crop"),
        ({"blur_kernel": 4}, "views.blur_kernel is 4; .* odd"),
        ({"std": (0.0,)}, "views.std"),
        ({"mean": ()}, "views.mean"),
        ({"brightness": float("inf")}, "views.brightness"),
        ({"size": 0}, "views.size"),
    ],
)
def test_refuses_with_a_sentence(change, sentence):
    with pytest.raises(UserError, match=sentence):
        ViewOptions(**change)


@pytest.mark.parametrize(
    ("options", "size", "channels", "sentence"),
    [
        (ViewOptions("dec-ssl"), 32, 4, "views.mean has 3 values for images of 4 channel"),
        (ViewOptions("l-dawa"), 32, 1, r"views.mean has 3 values for images of 1 channel"),
        (ViewOptions("fedx", mean=(0.5,), std=(0.5,)), 4, 1, "views.pad_crop is 4; it must be less than"),
        (ViewOptions(blur=0.5, blur_kernel=23), 8, 3, "views.blur_kernel is 23; .* at most 15"),
    ],
)
def test_refuses_what_does_not_fit_the_images(options, size, channels, sentence):
    with pytest.raises(UserError, match=sentence):
        make_views(options, size, channels)
