"""Secure aggregation at a site: its keys and secrets of a round, on disk between the requests.

A site passes through the stages of a round only once, with new keys. A second term under the same masks, or a
second sum of the round over other clients, would reveal a single client's term as a difference.
"""

from __future__ import annotations

from pathlib import Path

from atoll.aggregation.secure_sum import SecureSum
from atoll.aggregation.update_geometry import Reference
from atoll.components.messages import Update
from atoll.core.errors import UserError
from atoll.core.tree import Tree, load, save
from atoll.engines.client import Client
from atoll.engines.flower.masks import make_keys, mask, reveal, share_secrets
from atoll.engines.flower.site_errors import SiteError

FILE = "secure.safetensors"  # in the run's folder at the site


def answer_keys(folder: Path, request: Tree) -> Tree:
    """Draw the keys of a round, and return the public ones."""
    opened = _read(folder).get("opened", {})
    state, public = make_keys()
    save(folder / FILE, {"round": request["round"], "masks": state, "opened": opened})
    return {"keys": public}


def answer_shares(folder: Path, request: Tree) -> Tree:
    """Share the secrets of a round among its clients.

    Raises:
        SiteError: The site has already shared them.
    """
    kept = _round(folder, request["round"])
    _once(kept, "keys", "shared the secrets")
    state, sent, commitments = share_secrets(
        kept["masks"], request["client"], request["keys"], request["threshold"]
    )
    save(folder / FILE, {**kept, "masks": state})
    return {"shares": sent, "commitments": commitments}


def masked_update(folder: Path, request: Tree, update: Update, client: Client) -> Tree:
    """Return the masked term of a trained update, the only form in which it leaves the site.

    Raises:
        SiteError: The coordinator asks for an update without masks, for a second one under the same masks, or lets
            too few clients open them.
    """
    if "shares" not in request:
        raise SiteError(
            "the recipe promises secure aggregation, and the coordinator asks for an update without masks"
        )
    message, aggregation = request["message"], client.method.aggregation
    assert isinstance(aggregation, SecureSum)  # noqa: S101
    kept = _round(folder, message["round"])
    _once(kept, "received", "sent its term")
    threshold, clients = kept["masks"]["threshold"], len(kept["masks"]["keys"])
    if threshold < aggregation.least(clients):
        raise SiteError(
            f"the coordinator lets {threshold} of {clients} clients open the masks, and the recipe demands "
            f"{aggregation.least(clients)}"
        )
    model = client.context.received
    geometry = Reference(model).measure(update["weights"])
    largest = client.constants[aggregation.name]["largest"]
    term = aggregation.encode(update, geometry, model, client.setting, largest)
    state, masked = mask(kept["masks"], message["client"], request["shares"], term)
    save(folder / FILE, {**kept, "masks": state})
    return {"masked": masked}


def answer_reveal(folder: Path, request: Tree) -> Tree:
    """Open the shares that the sum of a round needs.

    Raises:
        SiteError: The round was opened before, for other clients.
    """
    kept = _round(folder, request["round"])
    stayed = sorted(request["stayed"])
    before = kept["opened"].setdefault(str(request["round"]), stayed)
    if before != stayed:
        raise SiteError(
            f"this site has opened the sum of round {request['round']} over other clients; both sums together "
            "would reveal a single update, so the run cannot repeat this round without the same clients"
        )
    shares = reveal(kept["masks"], request["client"], stayed)
    save(folder / FILE, kept)
    return {"shares": shares}


def _read(folder: Path) -> dict[str, Tree]:
    if not (folder / FILE).is_file():
        return {}
    try:
        found: dict[str, Tree] = load(folder / FILE)
    except UserError as error:
        raise SiteError(
            "the site cannot read what it keeps for secure aggregation; its own log names the file, and its owner "
            "restores it from a copy. Without it the site no longer knows which sums it has opened, so it is "
            "deleted only for a run that repeats no round"
        ) from error
    return found


def _round(folder: Path, round: int) -> dict[str, Tree]:
    kept = _read(folder)
    if type(round) is not int or kept.get("round") != round:
        raise SiteError(
            f"this site has no keys of round {round} for secure aggregation; the next round begins anew"
        )
    return kept


def _once(kept: dict[str, Tree], key: str, done: str) -> None:
    """Refuse a stage that was already completed with these masks."""
    if key in kept["masks"]:
        raise SiteError(
            f"this site has {done} of round {kept['round']}, and does so once; to repeat the round, begin with "
            "new keys"
        )
