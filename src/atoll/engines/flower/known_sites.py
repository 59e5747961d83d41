"""The coordinator's list of sites and their keys (``sites.toml``).

    [keys]                          # a site's name and the content of its .pub file
    east = "ecdsa-sha2-nistp384 AAAA…"
    west = "ecdsa-sha2-nistp384 AAAA…"

    [revoked]                       # a site's name and the reason, which the site is told
    west = "its disk was stolen"

The file is read again before every round, and decides who takes part in it. During a run, a site leaves if it is
revoked, if its line is deleted or if its key is replaced; with its new key, it comes back as the same client.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

from atoll.core.config import Options, build, parse_toml
from atoll.core.errors import UserError
from atoll.core.files import read_bytes
from atoll.core.text import clean

log = logging.getLogger("flwr")


@dataclass(frozen=True)
class KnownSites(Options, section="sites"):
    """The sites that may take part.

    Attributes:
        keys: Each site's public key, as in its ``.pub`` file.
        revoked: Sites that may no longer take part, with the reasons.
    """

    keys: dict[str, str]
    revoked: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> KnownSites:
        """Read the file.

        Raises:
            UserError: The file cannot be read or does not have this form, a key is not a public key, or two sites
                have the same one.
        """
        table = parse_toml(read_bytes(path), str(path))
        if "keys" not in table:
            raise UserError(f"{path} has no table [keys]; list each site's name with its public key there")
        made = build(cls, table, file=path)
        sites: dict[str, str] = {}  # by key
        for site in made.keys:
            if (other := sites.setdefault(made.key(site), site)) != site:
                raise UserError(
                    f"{path} gives {other!r} and {site!r} the same key; copy the line of each site's own .pub file"
                )
        return made

    def read_again(self, path: Path) -> KnownSites:
        """Read the file again; while it is invalid, half-edited perhaps, its last valid content stays in use."""
        try:
            return KnownSites.read(path)
        except UserError as error:
            log.warning(
                "%s; the sites' keys are as they were: a site that the edit should exclude STILL TAKES PART until "
                "the file is correct",
                error,
            )
            return self

    def key(self, site: str) -> str:
        """Public key of a site in hex, as Flower reports it.

        Raises:
            UserError: It is not a public key.
        """
        try:
            found = load_ssh_public_key(self.keys[site].encode())
        except (ValueError, UnsupportedAlgorithm):
            raise UserError(
                f"the key of {site!r} in sites.toml is no public key; copy the line in the site's .pub file"
            ) from None
        return found.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).hex()

    def owner(self, key: str) -> str:
        """Name of the site that has a key; empty if none has it."""
        return next((site for site in self.keys if self.key(site) == key), "")

    def refuse(self, site: str, key: str) -> str | None:
        """Reason why a node with this key cannot be this site; None if it can."""
        if reason := self.exclude(site):
            return reason
        return None if key == self.key(site) else f"its key is not the one that sites.toml binds to {site!r}"

    def exclude(self, site: str) -> str | None:
        """Reason why a site cannot take part with any key; None if it can."""
        if site in self.revoked:
            return f"the key of {site!r} was revoked: {clean(self.revoked[site])}"
        return None if site in self.keys else f"{site!r} is not one of the sites in sites.toml"

    def unknown(self, sites: Iterable[str]) -> set[str]:
        """Revoked names that have no key and are none of these sites, as a misspelt name is."""
        return self.revoked.keys() - self.keys.keys() - set(sites)
