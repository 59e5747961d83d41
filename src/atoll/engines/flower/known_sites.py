"""The coordinator's list of sites and their keys (``sites.toml``).

    [keys]                          # a site's name and the content of its .pub file
    east = "ecdsa-sha2-nistp384 AAAA…"
    west = "ecdsa-sha2-nistp384 AAAA…"

    [revoked]                       # a site's name and the reason, which the site is told
    west = "its disk was stolen"

The file is read again before every round, so a key can be revoked during a run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

from atoll.core.config import Options, build, parse_toml
from atoll.core.errors import UserError
from atoll.core.files import read_bytes
from atoll.core.text import clean


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
            UserError: The file cannot be read or does not have this form, or a key is not a public key.
        """
        table = parse_toml(read_bytes(path), str(path))
        if "keys" not in table:
            raise UserError(f"{path} has no table [keys]; list each site's name with its public key there")
        made = build(cls, table)
        for site in made.revoked:
            if site not in made.keys:
                raise UserError(f"{path} revokes {site!r}, which is not one of its [keys]")
        for site in made.keys:
            made.key(site)
        return made

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

    def refuse(self, site: str, key: str) -> str | None:
        """Reason why a node with this key cannot be this site; None if it can."""
        if site not in self.keys:
            return f"{site!r} is not one of the sites in sites.toml"
        if key != self.key(site):
            return f"its key is not the one that sites.toml binds to {site!r}"
        return self.why_revoked(site)

    def why_revoked(self, site: str) -> str | None:
        """Reason why a site may no longer take part; None if it may."""
        return (
            f"the key of {site!r} was revoked: {clean(self.revoked[site])}" if site in self.revoked else None
        )
