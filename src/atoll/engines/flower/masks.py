"""The masks of secure aggregation (Bonawitz et al. 2017): how they are drawn, and removed from a sum.

    y_u = x_u + PRG(b_u) + Σ_{v<u} PRG(s_uv) − Σ_{v>u} PRG(s_uv)   mod 2³²

s_uv is the secret that u and v agree on by their keys, so the pairs' masks cancel in the sum over all clients. b_u
and u's key are shared among the clients (Shamir), of whom a threshold can open either: b_u if u stayed, the key if
u dropped out, never both of one client. Each client commits to its shares by their SHA-256, so that a wrong share
is detected when it is opened. Key agreement, encryption of the shares and secret sharing are Flower's
(`flwr.common.secure_aggregation`). The masks are ChaCha20's key stream (`cryptography`); Flower's own generator
seeds NumPy with 32 bits, all values of which can be tried.

The functions are pure: they take and return trees, and bytes in them are hexadecimal.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from collections.abc import Collection, Mapping, Sequence

import torch
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.fernet import InvalidToken
from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import decrypt, encrypt, generate_shared_key
from flwr.common.secure_aggregation.secaggplus_utils import (
    share_keys_plaintext_concat,
    share_keys_plaintext_separate,
)
from flwr.supercore.primitives.asymmetric import (
    bytes_to_private_key,
    bytes_to_public_key,
    generate_key_pairs,
    private_key_to_bytes,
    public_key_to_bytes,
)
from torch import Tensor

from atoll.aggregation.secure_sum import MODULUS
from atoll.core.tree import Tree
from atoll.engines.flower.site_errors import SiteError

Shares = dict[str, str]  # one for each client, by its id
PublicKeys = dict[str, dict[str, str]]
NO_SHARE = "00"
NO_KEY = (AttributeError, TypeError, UnsupportedAlgorithm, ValueError)  # no key, or a key of another kind


def make_keys() -> tuple[Tree, dict[str, str]]:
    """Stage 0, at a client: draw keys for the masks and for the encryption of shares.

    Returns:
        The state that the client retains for the next stages, and its public keys.
    """
    state, public = {}, {}
    for purpose in ("mask", "share"):
        private, key = generate_key_pairs()
        state[purpose] = private_key_to_bytes(private).hex()
        public[purpose] = public_key_to_bytes(key).hex()
    return {**state, "public": public}, public


def is_public_key(word: str) -> bool:
    """Whether a word is a public key as `make_keys` writes it, so that equal keys are equal words."""
    try:
        key = bytes_to_public_key(bytes.fromhex(word))
        return isinstance(key.curve, SECP384R1) and public_key_to_bytes(key).hex() == word
    except NO_KEY:
        return False


def share_secrets(state: Tree, me: int, keys: PublicKeys, threshold: int) -> tuple[Tree, Shares, Shares]:
    """Stage 1, at a client: draw b_u, and share it and the key among all clients.

    Returns:
        The state that the client retains, the encrypted shares for each other client, and the commitment to each
        client's shares: the SHA-256 of the share of b_u, then that of the share of the key.

    Raises:
        SiteError: The keys are not those of a round in which this client can take part.
    """
    if keys.get(str(me)) != state["public"]:
        raise SiteError("the coordinator replaced the keys of this site for secure aggregation")
    for client, key in keys.items():
        if not all(is_public_key(key[purpose]) for purpose in ("mask", "share")):
            raise SiteError(f"the keys of client {client} for secure aggregation are no public keys")
    # A key must not have two roles: if a client drops out, the key of its masks is opened, and nothing else may be.
    roles = {word for key in keys.values() for word in key.values()}
    if len(roles) < 2 * len(keys) or not 2 <= threshold <= len(keys):
        raise SiteError(f"{len(keys)} keys with the threshold {threshold} are too few for secure aggregation")
    own = secrets.token_bytes(32)
    order = sorted(map(int, keys))
    own_shares = create_shares(own, threshold, len(order))
    key_shares = create_shares(bytes.fromhex(state["mask"]), threshold, len(order))
    plain, commitments = {}, {}
    for other, of_own, of_key in zip(order, own_shares, key_shares, strict=True):
        plain[other] = share_keys_plaintext_concat(me, other, of_own, of_key)
        commitments[str(other)] = "".join(hashlib.sha256(share).hexdigest() for share in (of_own, of_key))
    sent = {
        str(other): encrypt(_agree(state["share"], keys[str(other)]["share"]), text).hex()
        for other, text in plain.items()
        if other != me
    }
    state = {**state, "own": own.hex(), "keys": keys, "kept": plain[me].hex(), "threshold": threshold}
    return state, sent, commitments


def mask(state: Tree, me: int, received: Shares, term: Tensor) -> tuple[Tree, Tensor]:
    """Stage 2, at a client: mask its term.

    Args:
        state: The state that the client retained.
        me: Its id.
        received: The encrypted share of each other client that takes part.
        term: Whole numbers in [0, 2³²), in int64.

    Returns:
        The state that the client retains, and the masked term as int32.

    Raises:
        SiteError: Too few or unknown clients take part, or too few of their shares can be read.
    """
    if len(received) + 1 < state["threshold"] or not received.keys() <= state["keys"].keys() - {str(me)}:
        raise SiteError(f"only {len(received) + 1} clients take part in the sum, fewer than its threshold")
    unread = [name for name, box in received.items() if _open(state, me, int(name), box) is None]
    # A damaged share of another client must not end this client's round. But in a request from before a crash, all
    # keys differ, and it must not use the masks.
    if len(received) + 1 - len(unread) < state["threshold"]:
        raise SiteError(f"the shares of clients {', '.join(unread)} are damaged, or of other keys")
    masked = term + _stream(bytes.fromhex(state["own"]), len(term))
    for other in map(int, received):
        pair = _stream(_seed(_agree(state["mask"], state["keys"][str(other)]["mask"])), len(term))
        masked = masked + pair if other < me else masked - pair
    return {**state, "received": received}, _to_int32(masked % MODULUS)


def reveal(state: Tree, me: int, stayed: Collection[int]) -> Shares:
    """Stage 3, at a client: open b_u of the clients that stayed, and the key of those that dropped out.

    `NO_SHARE` replaces a share that cannot be read; the server sees that the sender committed to another share.

    Raises:
        SiteError: Too few clients stayed.
    """
    members = {me, *map(int, state["received"])}
    if me not in stayed or not set(stayed) <= members or len(set(stayed)) < state["threshold"]:
        raise SiteError(f"{len(set(stayed))} clients stayed in the sum, and {state['threshold']} must")
    found = {}
    for other in sorted(members):
        if other == me:
            text: bytes | None = bytes.fromhex(state["kept"])
        else:
            text = _open(state, me, other, state["received"][str(other)])
        _, _, of_own, of_key = share_keys_plaintext_separate(text or b"")
        found[str(other)] = (of_own if other in stayed else of_key).hex() or NO_SHARE
    return found


def _open(state: Tree, me: int, other: int, word: str) -> bytes | None:
    """Decrypt what another client shared with this one under the keys of this round; None if it cannot be read."""
    try:
        text = decrypt(_agree(state["share"], state["keys"][str(other)]["share"]), bytes.fromhex(word))
    except InvalidToken:
        return None
    source, target, *_ = share_keys_plaintext_separate(text)
    return text if (source, target) == (other, me) else None


def is_committed(share: str, commitment: str, stays: bool) -> bool:
    """Whether an opened share is the one that its sender committed to.

    Args:
        share: The share that was opened.
        commitment: The sender's commitment to this share (see `share_secrets`).
        stays: Whether the share is one of b_u; otherwise, it is one of the key.
    """
    found = hashlib.sha256(bytes.fromhex(share)).hexdigest()
    return found == (commitment[: len(found)] if stays else commitment[len(found) :])


def unmask(
    total: Tensor, keys: PublicKeys, stayed: Collection[int], opened: Mapping[int, Sequence[str]]
) -> Tensor:
    """Stage 3, at the server: remove the masks that do not cancel from the sum of the masked terms.

    Args:
        total: Sum of the masked terms of the clients that stayed, in int64.
        keys: All clients' public keys.
        stayed: Clients whose masked terms are in the sum.
        opened: For each client that shared its secrets, a threshold of opened shares.

    Returns:
        The sum of the terms modulo 2³².

    Raises:
        ValueError: The shares of a client do not yield its secret.
    """
    for client, shares in opened.items():
        try:
            secret = combine_shares([bytes.fromhex(share) for share in shares])
            if client in stayed:
                total = total - _stream(secret, len(total))
                continue
            key = bytes_to_private_key(secret).public_key()
            if public_key_to_bytes(key).hex() != keys[str(client)]["mask"]:
                raise ValueError("another key")
        except NO_KEY as error:
            raise ValueError(f"the shares of client {client} do not give its secret: {error}") from None
        for other in stayed:
            pair = _stream(_seed(_agree(secret.hex(), keys[str(other)]["mask"])), len(total))
            total = total - pair if client < other else total + pair
    return total % MODULUS


def to_numbers(masked: Tensor) -> Tensor:
    """A masked term as int64 in [0, 2³²)."""
    return masked.long() % MODULUS


def _to_int32(numbers: Tensor) -> Tensor:
    return torch.where(numbers < MODULUS // 2, numbers, numbers - MODULUS).int()


def _agree(private: str, public: str) -> bytes:
    mine = bytes_to_private_key(bytes.fromhex(private))
    return generate_shared_key(mine, bytes_to_public_key(bytes.fromhex(public)))


def _seed(agreed: bytes) -> bytes:
    return hashlib.sha256(base64.urlsafe_b64decode(agreed)).digest()


def _stream(key: bytes, count: int) -> Tensor:
    """Draw ``count`` numbers in [0, 2³²) from ChaCha20 with a key of 32 bytes."""
    cipher = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    return torch.frombuffer(bytearray(cipher.update(bytes(4 * count))), dtype=torch.int32).long() % MODULUS
