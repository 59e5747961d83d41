"""The colours of page.css, as people see them who lack one kind of cone."""

import re
from importlib import resources

import numpy as np
import pytest

CSS = (resources.files("atoll.report") / "page.css").read_text()
# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
SIGHT = {
    "usual": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.01182, 0.04294, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.3039],
    ],
}


def theme(name):
    light, dark = CSS.split("prefers-color-scheme: dark")[0], CSS.split("prefers-color-scheme: dark")[1]
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", {"light": light, "dark": dark}[name]))


def linear(colour):
    value = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def contrast(a, b):
    """WCAG 2."""
    low, high = sorted(float(linear(colour) @ [0.2126, 0.7152, 0.0722]) for colour in (a, b))
    return (high + 0.05) / (low + 0.05)


def oklab(rgb):
    """Björn Ottosson's perceptual space: equal distances look about equally far apart."""
    to_lms = [
        [0.4122215, 0.5363325, 0.051446],
        [0.2119035, 0.6806995, 0.107397],
        [0.0883025, 0.2817188, 0.6299787],
    ]
    to_lab = [
        [0.2104543, 0.7936178, -0.004072],
        [1.9779985, -2.4285922, 0.4505937],
        [0.025904, 0.7827718, -0.8086758],
    ]
    return np.array(to_lab) @ np.cbrt(np.array(to_lms) @ np.clip(rgb, 0, 1))


@pytest.mark.parametrize("name", ["light", "dark"])
@pytest.mark.parametrize("sight", SIGHT)
def test_colours_stay_apart_for_every_kind_of_sight(name, sight):
    colours = [theme(name)[f"c{i}"] for i in range(8)]
    seen = np.stack([oklab(np.array(SIGHT[sight]) @ linear(colour)) for colour in colours])
    apart = np.linalg.norm(seen[:, None] - seen[None], axis=-1) + np.eye(8)
    assert apart.min() > 0.085  # about four just noticeable differences


@pytest.mark.parametrize("name", ["light", "dark"])
def test_contrast_is_enough_for_text_and_for_marks(name):
    colours = theme(name)
    for ground in ("paper", "card"):
        for text in ("ink", "soft", "accent"):
            assert contrast(colours[text], colours[ground]) >= 4.5
        for mark in ("untrained", *(f"c{i}" for i in range(8))):
            assert contrast(colours[mark], colours[ground]) >= 3.0
    assert contrast(colours["paper"], colours["accent"]) >= 4.5  # a pressed button
    assert contrast(colours["ink"], colours["warn"]) >= 4.5
    assert contrast(colours["ink"], colours["tint"]) >= 4.5
