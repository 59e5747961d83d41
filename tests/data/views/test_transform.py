"""Views by the user's own transform, against a loop over images."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision.transforms import ToTensor, v2

import atoll
from atoll.commands.neighbours import find_neighbours
from atoll.core.errors import UserError
from atoll.core.run_folder import Run
from atoll.data.views.transform import give_transform
from atoll.data.views.views import ViewOptions, make_views
from atoll.recipe.recipe import load_recipe, make_recipe
from atoll.report.neighbours import measures_words
from tests.data.given import LABELS, pixels, small
from tests.kills import ends_alike_after_kills

IMAGES = torch.from_numpy(pixels(6)).permute(0, 3, 1, 2)
SIMCLR = v2.Compose(
    [
        v2.RandomResizedCrop(8, scale=(0.3, 1), antialias=True),
        v2.RandomHorizontalFlip(),
        v2.ColorJitter(0.4, 0.4, 0.4, 0.1),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize([0.5] * 3, [0.25] * 3),
    ]
)


def invert(image: Tensor) -> Tensor:
    """A function that a recipe names; it works in place."""
    return image.neg_().sub_(1)


def views_of(transform: object, **options: object) -> Callable[[Tensor], Tensor]:
    made = make_views(ViewOptions(transform=give_transform(transform), **options), 8, 3)
    return lambda images: made(images, torch.Generator().manual_seed(3))


def test_views_are_those_of_a_loop_that_seeds_each_image() -> None:
    made = views_of(SIMCLR)(IMAGES)
    seeds = torch.randint(2**32, (6,), generator=torch.Generator().manual_seed(3)).tolist()
    for image, seed, view in zip(IMAGES, seeds, made, strict=True):
        torch.manual_seed(seed)
        assert torch.equal(SIMCLR(image), view)
    assert torch.equal(views_of(SIMCLR)(IMAGES[:2]), made[:2])  # whatever the other images are
    assert not torch.equal(made[0], views_of(SIMCLR)(IMAGES[[1, 0]])[1])  # each has a seed of its own


def test_pytorchs_settings_are_those_from_before_a_transform() -> None:
    """The training between its calls would use others."""

    def meddles(image: Tensor) -> Tensor:
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(before + 1)
        return image

    before = torch.get_num_threads()
    assert torch.equal(views_of(meddles)(IMAGES), views_of(lambda image: image)(IMAGES))
    assert (torch.get_num_threads(), torch.get_default_dtype()) == (before, torch.float32)


def test_every_stream_is_seeded_and_the_process_keeps_its_own() -> None:
    def noise(image: Tensor) -> Tensor:
        draws = torch.rand(1) + np.random.rand() + random.random()
        return image / 255 + draws.float()

    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    first = views_of(noise)(IMAGES)
    after = torch.rand(1), np.random.rand(), random.random()
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    assert after == (torch.rand(1), np.random.rand(), random.random())
    assert torch.equal(views_of(noise)(IMAGES), first)
    assert len({float(one) for one in (first - IMAGES / 255)[:, 0, 0, 0]}) == 6


def test_uint8_is_normalised_and_floats_are_not() -> None:
    stored = IMAGES.clone()
    made = views_of(invert, mean=(0.5,), std=(0.25,))(stored)
    assert torch.equal(stored, IMAGES)
    torch.testing.assert_close(made, ((255 - IMAGES.float()) / 255 - 0.5) / 0.25)
    same_floats = views_of(lambda image: image / 255, mean=(0.5,), std=(0.25,))(IMAGES)
    assert torch.equal(same_floats, IMAGES / 255)


WRONG = {
    r"returns uint8 \(3, 6, 6\) for an image; it must return a tensor of shape \(3, 8, 8\)": v2.CenterCrop(6),
    "returns a list for an image": lambda image: [image],
    r"returns int64 \(3, 8, 8\)": lambda image: image.long(),
    r"pic should be PIL Image.*; one for Pillow's images can begin with .*ToPILImage\(\)$": ToTensor(),
    r"fails for an image, uint8 \(3, 8, 8\): ZeroDivisionError: .*test_transform.py, line": lambda image: (
        1 / 0
    ),
}


@pytest.mark.parametrize("sentence", WRONG)
def test_a_transform_that_makes_no_view_is_refused_in_one_sentence(sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        views_of(WRONG[sentence])(IMAGES)


def standardise(image: torch.Tensor) -> torch.Tensor:
    """A transform that divides by an image's spread."""
    return (image.float() - image.float().mean()) / image.float().std()


def test_a_view_that_is_not_finite_is_refused() -> None:
    views = make_views(ViewOptions(transform=give_transform(standardise)), 8, 3)
    assert views(IMAGES, torch.Generator()).isfinite().all()
    plain = torch.full((1, 3, 8, 8), 7, dtype=torch.uint8)
    with pytest.raises(
        UserError, match="returns a view that is not finite for an image with the values 7 to 7"
    ):
        views(plain, torch.Generator())


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"transform is a str; name 'simclr' in the recipe, as views\.preset, or"
    ):
        give_transform("simclr")
    with pytest.raises(
        UserError, match=r"^transform is the class Compose; give an object of it, Compose\(…\)$"
    ):
        give_transform(v2.Compose)
    with pytest.raises(UserError, match="names no code; set it to module:attribute"):
        ViewOptions(transform="simclr")
    named = make_views(ViewOptions(transform="torch:pi"), 8, 3)
    with pytest.raises(UserError, match="is a float, not a function"):
        named(IMAGES, torch.Generator())


def test_a_recipe_that_names_a_transform_names_code() -> None:
    recipe = make_recipe({"views": {"transform": "mine:views"}})
    assert recipe.own_code == ("mine:views",)
    assert make_recipe({"views": {"transform": give_transform(invert)}}).own_code == ()


def short(rounds: int) -> dict[str, object]:
    return small(train={"rounds": rounds, "epochs": 1, "batch_size": 16, "lr": 0.01})


def test_a_run_records_the_transform_and_a_resumed_run_compares_it(tmp_path: Path) -> None:
    data = (pixels(), LABELS)
    with pytest.warns(UserWarning, match=r"'object:invert#\w+' makes views one image at a time"):
        run = atoll.simulate(short(1), tmp_path / "run", data=data, transform=invert)
    assert load_recipe(run.recipe_path, own_code=False).views.transform == give_transform(invert)
    longer = short(2)
    with pytest.raises(
        UserError, match=r"started with views.transform = 'object:invert#\w+', and the recipe now"
    ):
        atoll.simulate(longer, run.folder, resume=True, data=data, transform=SIMCLR)
    only_named = {**longer, "views": {"transform": str(run.recipe.views.transform)}}
    with pytest.raises(UserError, match="pass it again as transform="):
        atoll.simulate(only_named, tmp_path / "other", data=data)
    with pytest.warns(UserWarning, match="makes views one image at a time"):
        atoll.simulate(longer, run.folder, resume=True, data=data, transform=invert)
    named = {**longer, "views": {"transform": f"{__name__}:invert"}}
    with pytest.warns(UserWarning, match=r"\.test_transform:invert' makes views one image at a time"):
        by_name = atoll.simulate(named, tmp_path / "named", data=data)
    assert by_name.encoder_path.read_bytes() == run.encoder_path.read_bytes()


def test_neighbours_of_a_run_with_a_transform_object_go_without_its_views(tmp_path: Path) -> None:
    recipe = make_recipe(short(0))
    with pytest.warns(UserWarning, match="makes views one image at a time"):
        run = atoll.simulate(recipe, tmp_path / "run", transform=invert)
    with pytest.warns(
        UserWarning, match="left out how often a view finds its image: the transform 'object:invert"
    ):
        found = find_neighbours(Run(run.folder))
    assert "retrieval" not in found["measures"]
    assert measures_words(found)[0].startswith("Effective rank")


KILLED = """
import sys; sys.path.insert(0, {root!r})
import random
from pathlib import Path
import atoll, torch
from tests.data import given as ours
from tests.kills import Killed

class Noise:  # of __main__, as a notebook's classes are
    def __call__(self, image):
        return (image / 255 + torch.rand(1) * random.random()).clamp(0, 1)

if __name__ == "__main__":
    workers, kill = int(sys.argv[2]), sys.argv[3] == "kill"
    recipe = ours.small(engine={{"workers": workers}})
    data = (ours.pixels(), ours.LABELS)
    calls = [Killed()] if kill else []
    atoll.simulate(recipe, sys.argv[1], Path(sys.argv[1]).exists(), data=data, transform=Noise(), callbacks=calls)
"""


@pytest.mark.slow
def test_two_workers_and_a_kill_end_with_the_same_bytes(tmp_path: Path) -> None:
    said = ends_alike_after_kills(KILLED, tmp_path)
    assert said.count("one image at a time") == 1
