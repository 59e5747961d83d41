"""A digest finds every flipped bit, and nothing passes for a file without one."""

import zlib

import pytest

from atoll.core.digests import DIGITS, JSON, TOML, DamagedError, open_text, seal_at, seal_text, verify_at

TEXTS = {
    "json": (b'{"round": 3, "loss": 0.125}\n', JSON),
    "toml": (b'name = "x"\n[train]\nlr = 0.1\n', TOML),
}


@pytest.mark.parametrize("kind", TEXTS)
def test_a_text_keeps_its_content_and_says_that_it_was_verified(kind):
    body, form = TEXTS[kind]
    sealed = seal_text(body, form)
    assert open_text(sealed, form) == (body, True)
    assert f"{zlib.crc32(body):08x}".encode() in sealed


@pytest.mark.parametrize("kind", TEXTS)
def test_no_flipped_bit_of_a_text_is_missed(kind):
    body, form = TEXTS[kind]
    sealed = seal_text(body, form)
    for bit in range(8 * len(sealed)):
        flipped = bytearray(sealed)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedError):
            open_text(bytes(flipped), form)


@pytest.mark.parametrize("kind", TEXTS)
def test_a_truncated_text_is_damaged(kind):
    body, form = TEXTS[kind]
    sealed = seal_text(body, form)
    for length in range(1, len(sealed)):
        with pytest.raises(DamagedError):
            open_text(sealed[:length], form)


@pytest.mark.parametrize(
    ("text", "form"),
    [
        (b'{"round": 0, "evaluation": {}}', JSON),
        (b'{"fingerprint": "0", "clients": []}', JSON),
        (b'{\n "federation": "0"}', JSON),
        (b'name = "run"\n', TOML),
        (b"", TOML),
    ],
)
def test_a_text_of_0_1_has_no_digest(text, form):
    assert open_text(text, form) == (text, False)


def test_no_flipped_bit_of_bytes_is_missed():
    first = b"head key:" + b"0" * DIGITS + bytes(range(20))
    sealed = b"".join(seal_at([first, memoryview(bytes(range(20, 40)))], b"key:"))
    verify_at(sealed, b"key:")
    for bit in range(8 * len(sealed)):
        flipped = bytearray(sealed)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match=r"digest|subsection"):
            verify_at(bytes(flipped), b"key:")
