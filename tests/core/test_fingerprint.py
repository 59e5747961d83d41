"""Fingerprints of objects: equal for equal content, whatever the process, and different for other content."""

import logging
import pickle
from functools import partial

import cloudpickle
import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from atoll.core.fingerprint import fingerprint

STRENGTH = 0.4
CROP = v2.RandomCrop(8, padding=1)


def by_globals(image):
    return [CROP(part) * STRENGTH for part in (image,)]  # found in a nested code object


def closure(factor):
    return lambda image: image * factor


class Jitter:
    """One of the user's own classes."""

    scale = (1, 2)

    def __init__(self, strength=0.5):
        self.strength = strength
        self.me = self  # a circle

    def __call__(self, image):
        return image * self.strength


def other_call(self, image):
    return image + self.strength


def jitter_with(**attributes):
    return type("Jitter", (Jitter,), attributes)()


PAIRS = {
    "a parameter of torchvision's": (v2.RandomCrop(8), v2.RandomCrop(9)),
    "inside a composition": (v2.Compose([v2.RandomCrop(8)]), v2.Compose([v2.RandomCrop(8), v2.RandomGrayscale()])),
    "a lambda's code": (lambda image: image + 1, lambda image: image + 2),
    "a function around a function": (closure(2), closure(3)),
    "a tensor": (v2.Normalize([0.5], [0.5]), v2.Normalize([0.5], [0.25])),
    "an argument": (partial(closure, 1), partial(closure, factor=1)),
    "an attribute": (Jitter(0.5), Jitter(0.25)),
    "a method": (jitter_with(a=1), jitter_with(a=1, __call__=other_call)),
    "an attribute of the class": (jitter_with(scale=(1, 2)), jitter_with(scale=(1, 3))),
    "a bound method": (Jitter(0.5).__call__, Jitter(0.25).__call__),
    "types of numbers": ([1], [1.0]),
    "16-bit floats": (torch.ones(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16)),
    "arrays of objects": (np.array([{}, 1], object), np.array([{}, 2], object)),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_other_content_has_another_fingerprint(name):
    one, other = PAIRS[name]
    assert fingerprint(one) != fingerprint(other)
    again = pickle.loads(cloudpickle.dumps(one))
    assert fingerprint(again) == fingerprint(one)


def test_what_a_function_finds_in_its_module_counts(monkeypatch):
    before = fingerprint(by_globals)
    assert fingerprint(by_globals) == before
    monkeypatch.setitem(globals(), "STRENGTH", 0.5)
    assert fingerprint(by_globals) != before
    monkeypatch.setitem(globals(), "STRENGTH", 0.4)
    assert fingerprint(by_globals) == before
    monkeypatch.setitem(globals(), "CROP", v2.RandomCrop(8, padding=2))
    assert fingerprint(by_globals) != before


def test_loggers_and_addresses_do_not_count():
    before = fingerprint(logging.getLogger("mine"))
    logging.getLogger("another of this process").setLevel(10)
    assert fingerprint(logging.getLogger("mine")) == before
    assert fingerprint(np.random.default_rng(0)) == fingerprint(np.random.default_rng(0))
    assert fingerprint(torch.Generator()) == fingerprint(torch.Generator())


def test_the_order_of_sets_and_shared_constants_do_not_count():
    names = [f"name{i}" for i in range(50)]
    assert fingerprint(set(names)) == fingerprint({*reversed(names)})
    pair = (1, 2)
    assert fingerprint([pair, pair]) == fingerprint([(1, 2), tuple(range(1, 3))])


def test_versions_of_libraries_count_unless_they_are_not_to(monkeypatch):
    held = [v2.RandomCrop, {v2.RandomGrayscale}]
    with_versions, without = fingerprint(held), fingerprint(held, versions=False)
    monkeypatch.setattr("torchvision.__version__", "99")
    assert fingerprint(held) != with_versions
    assert fingerprint(held, versions=False) == without
