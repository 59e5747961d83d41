"""What ``atoll methods`` shows: every method, in families."""

from __future__ import annotations

from typing import Any

from atoll.methods.catalogue import METHODS


def list_methods() -> dict[str, list[dict[str, Any]]]:
    """Methods by family: name, title, paper, parts, what leaves a client beyond weights, what it keeps."""
    families: dict[str, list[dict[str, Any]]] = {}
    for name, method in METHODS.items():
        families.setdefault(method.family, []).append(
            {
                "name": name,
                "title": method.title,
                "paper": method.paper,
                "objective": method.objective.name,
                "terms": [term.name for term in method.terms],
                "merge": method.merge.name,
                "aggregation": method.aggregation.name,
                "server": method.server.name,
                "supervised": method.needs_labels,
                "egress": list(method.egress_beyond_weights),
                "keeps": list(method.keeps),
            }
        )
    return families
