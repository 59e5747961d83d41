"""The masks alone: the sum is that of the terms to the bit, whoever of up to a third drops out, and when."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("flwr", reason="the extra atoll[flower] is not installed")

import numpy as np
import torch
from cryptography.fernet import Fernet
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from flwr.common.secure_aggregation.crypto.shamir import create_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import encrypt, generate_shared_key
from flwr.common.secure_aggregation.secaggplus_utils import share_keys_plaintext_concat
from flwr.supercore.primitives.asymmetric import bytes_to_private_key, bytes_to_public_key

from atoll.engines.flower.masks import (
    NO_SHARE,
    is_committed,
    is_public_key,
    make_keys,
    mask,
    reveal,
    share_secrets,
    to_numbers,
    unmask,
)
from atoll.engines.flower.site_errors import SiteError

MODULUS = 2**32


def play(terms, threshold, silent_shares=(), silent_terms=(), silent_reveals=()):
    """All stages of a round; clients fall silent at one of them."""
    clients = list(range(len(terms)))
    states, keys, boxes = {}, {}, {}
    for k in clients:
        states[k], keys[str(k)] = make_keys()
    for k in set(clients) - set(silent_shares):
        states[k], boxes[k], _ = share_secrets(states[k], k, keys, threshold)
    masked = {}
    for k in set(boxes) - set(silent_terms):
        received = {str(other): box[str(k)] for other, box in boxes.items() if other != k}
        states[k], masked[k] = mask(states[k], k, received, terms[k])
    stayed = sorted(masked)
    revealed = [reveal(states[k], k, stayed) for k in stayed if k not in silent_reveals]
    total = sum((to_numbers(term) for term in masked.values()), torch.zeros_like(terms[0])) % MODULUS
    opened = {k: [shares[str(k)] for shares in revealed[:threshold]] for k in boxes}
    return unmask(total, keys, stayed, opened), masked, states


def drawn(clients, size=1000, seed=0):
    draws = torch.Generator().manual_seed(seed)
    return [torch.randint(MODULUS, (size,), generator=draws) for _ in range(clients)]


def added(terms):
    """The plain sum modulo 2³², number by number."""
    return torch.tensor(
        [sum(column) % MODULUS for column in zip(*(term.tolist() for term in terms), strict=True)]
    )


def test_without_dropouts_the_sum_is_that_of_the_terms():
    terms = drawn(6)
    total, masked, _ = play(terms, 4)
    assert torch.equal(total, added(terms))
    assert all(term.dtype == torch.int32 for term in masked.values())


@pytest.mark.parametrize("stage", ["shares", "terms", "reveals"])
@pytest.mark.parametrize("gone", list(itertools.combinations(range(6), 2))[::3])
def test_a_third_may_drop_out_at_any_stage(gone, stage):
    terms = drawn(6)
    total, _, _ = play(terms, 4, **{f"silent_{stage}": gone})
    left = [term for k, term in enumerate(terms) if k not in gone or stage == "reveals"]
    assert torch.equal(total, added(left))


def test_a_client_may_drop_out_at_each_stage():
    terms = drawn(9)
    total, _, _ = play(terms, 6, silent_shares=[4], silent_terms=[0], silent_reveals=[8])
    assert torch.equal(total, added([term for k, term in enumerate(terms) if k not in (0, 4)]))


def test_a_masked_term_says_nothing_of_its_term():
    """Zeros are masked to numbers that look drawn from all of [0, 2³²), other ones each time."""
    zeros = [torch.zeros(20_000, dtype=torch.int64)] * 3
    _, one, _ = play(zeros, 2)
    _, two, _ = play(zeros, 2)
    for k in range(3):
        numbers = to_numbers(one[k]).double() / MODULUS
        assert float(numbers.mean()) == pytest.approx(0.5, abs=0.015)  # 7 deviations
        counts = torch.histc(numbers, 16, 0, 1)
        assert float(((counts - 1250) ** 2 / 1250).sum()) < 60  # χ² with 15 degrees: p = 2e-7
        assert not torch.equal(one[k], two[k])
        assert not torch.equal(one[k], one[(k + 1) % 3])


def test_fewer_than_the_threshold_open_nothing():
    terms = drawn(6)
    with pytest.raises(ValueError, match="3 clients stayed in the sum, and 4 must"):
        play(terms, 4, silent_terms=[0, 1, 2])
    with pytest.raises(ValueError, match="only 3 clients take part"):
        play(terms, 4, silent_shares=[0, 1, 2])


def test_each_byte_of_a_clients_own_secret_is_drawn_anew():
    """Only b_u protects a term that arrives after the key of its client's masks was opened."""
    keys, states = {}, {}
    for k in range(2):
        states[k], keys[str(k)] = make_keys()
    owns = [bytes.fromhex(share_secrets(states[0], 0, keys, 2)[0]["own"]) for _ in range(12)]
    assert {len(own) for own in owns} == {32}
    assert all(len(set(column)) > 4 for column in zip(*owns, strict=True))


def test_the_masks_of_pairs_cancel_and_are_other_ones_in_each_round():
    """What is left of a masked term without the term and b_u's mask, the key stream of ChaCha20."""
    terms, found = drawn(3, size=5_000), []
    for _ in range(2):
        _, masked, states = play(terms, 2)
        left = []
        for k in range(3):
            cipher = Cipher(algorithms.ChaCha20(bytes.fromhex(states[k]["own"]), bytes(16)), mode=None)
            words = np.frombuffer(cipher.encryptor().update(bytes(4 * 5_000)), "<u4").astype(np.int64)
            left.append((to_numbers(masked[k]) - terms[k] - torch.from_numpy(words)) % MODULUS)
        assert torch.equal(added(left), torch.zeros(5_000, dtype=torch.int64))
        found += left
    for one, other in itertools.combinations(found, 2):
        assert int((one == other).sum()) < 3
    for numbers in found:
        assert float(numbers.double().mean() / MODULUS) == pytest.approx(0.5, abs=0.03)  # 7 deviations


@pytest.mark.parametrize("count", [2, 3])
def test_fewer_shares_than_the_threshold_open_no_key(count):
    """Of a client that dropped out; the others would know all masks of its pairs."""
    terms = drawn(6)
    _, _, states = play(terms, 4, silent_terms=[5])
    keys, stayed = states[0]["keys"], list(range(5))
    shares = [reveal(states[k], k, stayed)["5"] for k in stayed]
    unmask(terms[0], keys, stayed, {5: shares[:4]})
    with pytest.raises(ValueError, match="the shares of client 5 do not give its secret"):
        unmask(terms[0], keys, stayed, {5: shares[:count]})


def test_too_few_shares_do_not_give_the_sum():
    with pytest.raises(ValueError, match="the shares of client 0 do not give its secret"):
        play(drawn(6), 4, silent_reveals=[0, 1, 2])


def test_a_client_notices_replaced_keys_and_damaged_shares():
    states, keys = {}, {}
    for k in range(3):
        states[k], keys[str(k)] = make_keys()
    with pytest.raises(ValueError, match="replaced the keys"):
        share_secrets(states[0], 0, {**keys, "0": keys["1"]}, 2)
    with pytest.raises(ValueError, match="too few"):
        share_secrets(states[0], 0, {**keys, "2": keys["1"]}, 2)  # one client in two roles
    with pytest.raises(ValueError, match="too few"):
        share_secrets(states[0], 0, keys, 1)
    with pytest.raises(ValueError, match="too few"):
        share_secrets(states[0], 0, keys, 4)
    for purpose in ("mask", "share"):
        with pytest.raises(ValueError, match="keys of client 2 for secure aggregation are no public keys"):
            share_secrets(states[0], 0, {**keys, "2": {**keys["2"], purpose: "00"}}, 2)
    boxes = {}
    for k in range(3):
        states[k], boxes[k], _ = share_secrets(states[k], k, keys, 2)
    term = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="the shares of clients 1, 2 are damaged, or of other keys"):
        mask(states[0], 0, {"1": boxes[2]["0"], "2": boxes[1]["0"]}, term)
    received = {"1": boxes[1]["0"], "2": boxes[2]["0"]}
    mask(states[0], 0, received, term)
    for stranger in ("0", "3"):  # itself, and a client that has sent no keys
        with pytest.raises(SiteError, match="clients take part in the sum"):
            mask(states[0], 0, {**received, stranger: boxes[1]["0"]}, term)


def damaged(state, keys):
    """Boxes of client 2 for client 0 without a share of client 2: of another key, without a sender, empty, a box
    of client 0 for client 2 that comes back, and boxes for another client and of another one."""
    agreed = generate_shared_key(
        bytes_to_private_key(bytes.fromhex(state["share"])),
        bytes_to_public_key(bytes.fromhex(keys["0"]["share"])),
    )
    other = encrypt(Fernet.generate_key(), b"another key")
    texts = [
        share_keys_plaintext_concat(source, target, *shares)
        for source, target, shares in (
            (2, 0, (b"", b"")),
            (0, 2, (b"own", b"key")),
            (2, 1, (b"own", b"key")),
            (1, 0, (b"own", b"key")),
        )
    ]
    return [other, *(encrypt(agreed, text) for text in (b"short", *texts))]


@pytest.mark.parametrize("which", range(6))
@pytest.mark.parametrize("stays", [True, False])
def test_a_client_leaves_out_one_damaged_share_and_takes_part(which, stays):
    states, keys, boxes = {}, {}, {}
    for k in range(4):
        states[k], keys[str(k)] = make_keys()
    for k in range(4):
        states[k], boxes[k], _ = share_secrets(states[k], k, keys, 3)
    boxes[2]["0"] = damaged(states[2], keys)[which].hex()
    terms, masked = drawn(4), {}
    stayed = [0, 1, 2, 3] if stays else [0, 1, 3]
    for k in stayed:
        received = {str(other): box[str(k)] for other, box in boxes.items() if other != k}
        states[k], masked[k] = mask(states[k], k, received, terms[k])
    revealed = [reveal(states[k], k, stayed) for k in stayed]
    assert revealed[0]["2"] == NO_SHARE
    total = sum(to_numbers(term) for term in masked.values()) % MODULUS
    readable = {k: [s[str(k)] for s in revealed if s[str(k)] != NO_SHARE] for k in range(4)}
    if stays:
        opened = {k: shares[:3] for k, shares in readable.items()}
        assert torch.equal(unmask(total, keys, stayed, opened), added(terms))
    else:
        assert len(readable[2]) == 2  # of three: the key stays closed


def test_a_key_has_one_role():
    states, keys = {}, {}
    for k in range(3):
        states[k], keys[str(k)] = make_keys()
    for other in (keys["1"]["share"], keys["2"]["share"]):
        with pytest.raises(ValueError, match="too few"):
            share_secrets(states[0], 0, {**keys, "2": {"mask": other, "share": keys["2"]["share"]}}, 2)


def test_a_public_key_has_one_form():
    _, keys = make_keys()
    pem = bytes.fromhex(keys["mask"])
    other = ec.generate_private_key(ec.SECP256R1()).public_key()
    rsa_key = rsa.generate_private_key(65537, 2048).public_key()
    form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    assert is_public_key(pem.hex())
    for wrong in (b"", b"key", pem + b"\n", other.public_bytes(*form), rsa_key.public_bytes(*form)):
        assert not is_public_key(wrong.hex())
    assert not is_public_key(1)


def test_a_client_commits_to_each_of_its_shares():
    states, keys, sent, committed = {}, {}, {}, {}
    for k in range(4):
        states[k], keys[str(k)] = make_keys()
    for k in range(4):
        states[k], sent[k], committed[k] = share_secrets(states[k], k, keys, 3)
    for k in range(3):
        received = {str(other): sent[other][str(k)] for other in range(4) if other != k}
        states[k], _ = mask(states[k], k, received, torch.zeros(1, dtype=torch.int64))
    for k in range(3):
        for client, share in reveal(states[k], k, [0, 1, 2]).items():
            stays = client != "3"
            for other in map(str, range(4)):
                found = is_committed(share, committed[int(client)][other], stays)
                assert found == (other == str(k)), (client, other)
            assert not is_committed(share, committed[int(client)][str(k)], not stays)
            assert not is_committed(share[:-2], committed[int(client)][str(k)], stays)


def test_shares_of_another_key_are_refused():
    """The shares agree with each other, and give a key that is not the one of the masks."""
    state, public = make_keys()
    other, _ = make_keys()
    keys = {"0": public, "1": make_keys()[1], "2": make_keys()[1]}
    for private, right in ((state["mask"], True), (other["mask"], False)):
        shares = [share.hex() for share in create_shares(bytes.fromhex(private), 2, 3)[:2]]
        total = torch.zeros(3, dtype=torch.int64)
        if right:
            unmask(total, keys, [1, 2], {0: shares})
        else:
            with pytest.raises(ValueError, match="shares of client 0 do not give its secret: another key"):
                unmask(total, keys, [1, 2], {0: shares})


def test_shares_of_a_key_with_a_password_are_refused():
    other = ec.generate_private_key(ec.SECP384R1()).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"password"),
    )
    shares = [share.hex() for share in create_shares(other, 2, 3)[:2]]
    keys = {str(k): make_keys()[1] for k in range(3)}
    with pytest.raises(ValueError, match="shares of client 0 do not give its secret: Password was not given"):
        unmask(torch.zeros(3, dtype=torch.int64), keys, [1, 2], {0: shares})


@pytest.mark.parametrize("stayed", [[1, 2, 3], [0, 1, 1, 1], [0, 1, 7], [0, 1, 2, 7]])
def test_a_client_opens_shares_only_for_itself_and_enough_clients_that_it_knows(stayed):
    """Otherwise, a coordinator could open its key, or a sum of fewer clients than the threshold."""
    _, _, states = play(drawn(4), 3)
    with pytest.raises(SiteError, match="clients stayed in the sum, and 3 must"):
        reveal(states[0], 0, stayed)


def test_the_two_secrets_of_a_client_are_never_opened_together():
    _, _, states = play(drawn(4), 3, silent_terms=[3])
    opened = reveal(states[0], 0, [0, 1, 2])
    other = reveal(states[0], 0, [0, 1, 2])
    assert opened == other
    assert len(bytes.fromhex(opened["1"])) < len(bytes.fromhex(opened["3"]))  # 32 bytes, and a private key
