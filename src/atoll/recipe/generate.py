"""Generate ``catalogue.json`` and the option tables in the docs from the options classes.

``python -m atoll.recipe.generate`` writes both, from the root of the repository. In a page, a table is between
``<!-- options: NAME -->`` and ``<!-- end -->``; NAME is a component, a section in brackets, ``recipe``
or ``detection``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atoll.core.schema import Schema, schema_of
from atoll.core.schema_check import words
from atoll.evaluation.detection.options import DetectionOptions
from atoll.methods.registry import (
    AGGREGATIONS,
    COMPONENTS,
    MERGES,
    METHODS,
    OBJECTIVES,
    SERVER_STEPS,
    TERMS,
)
from atoll.recipe.recipe import Recipe

AXES: dict[str, Mapping[str, Any]] = {
    "objective": OBJECTIVES,
    "terms": TERMS,
    "merge": MERGES,
    "aggregation": AGGREGATIONS,
    "server": SERVER_STEPS,
}
NOUNS = {
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "boolean": "true or false",
    "object": "table",
}
MOST_CHOICES = 8  # longer lists are given elsewhere in the docs


def catalogue() -> dict[str, Any]:
    """Build the catalogue that `atoll.recipe.table.catalogue` reads."""
    return {
        "schema": recipe_schema(),
        "components": {axis: list(known) for axis, known in AXES.items()},
        "methods": methods_by_family(),
    }


def methods_by_family() -> dict[str, list[dict[str, Any]]]:
    """List the methods by family: name, title, paper, components, egress in addition to weights, client state."""
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


def _first_line(cls: type) -> str:
    return (cls.__doc__ or "").strip().partition("\n")[0]


def recipe_schema() -> Schema:
    """Build the JSON schema of a recipe: the sections, and the options of each component."""
    schema = schema_of(Recipe)
    sections = {
        name: {**section, "default": {}} if name == "options" else section
        for name, section in schema["properties"].items()
    }
    method = dict(sections["method"]["properties"])
    for axis, known in {"name": METHODS, **AXES}.items():
        name = {"anyOf": [{"enum": list(known)}, {"type": "string", "pattern": ":"}]}
        said = {key: value for key, value in method[axis].items() if key in ("description", "default")}
        method[axis] = {**({"type": "array", "items": name} if axis == "terms" else name), **said}
    options = {
        name: {**schema_of(component), "description": _first_line(component)}
        for name, component in COMPONENTS.items()
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Atoll recipe",
        **schema,
        "properties": {
            "base": {"type": "string", "description": "The recipe that this one overrides."},
            **sections,
            "method": {**sections["method"], "properties": method},
            "options": {**sections["options"], "properties": options},
        },
    }


def option_table(schema: Schema) -> str:
    """Build a Markdown table of a section's options: name, type and range, default, meaning."""
    rows = [["option", "type", "default", "meaning"], ["---"] * 4]
    for name, option in schema["properties"].items():
        if option.get("type") != "object" or "default" in option:  # a section has a separate table
            default = option.get("default")
            shown = "none" if default is None else f"`{literal(default)}`"
            rows.append([f"`{name}`", kind_of(option), shown, option.get("description", "")])
    lines = (" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows)
    return "\n".join(f"| {line} |" for line in lines)


def kind_of(schema: Schema) -> str:
    """Describe the type and the range of a value."""
    if "anyOf" in schema:
        # Nouns first, then ranges: "whole number or `auto`, between 0 and 8".
        kinds = [kind_of(one).partition(", ") for one in schema["anyOf"] if one != {"type": "null"}]
        nouns, ranges = [noun for noun, _, _ in kinds], [limits for _, _, limits in kinds if limits]
        noun = "text" if "text" in nouns else " or ".join(nouns)  # any text includes the words that are named
        return ", ".join([noun, *ranges])
    if "enum" in schema and len(schema["enum"]) <= MOST_CHOICES:
        return " or ".join(f"`{literal(one)}`" for one in schema["enum"])
    if schema.get("type") == "array":
        return _kind_of_list(schema)
    noun, limits = NOUNS[schema.get("type", "string")], words(schema)
    return f"{noun}, {limits}" if limits else noun


def _kind_of_list(schema: Schema) -> str:
    if "prefixItems" in schema:
        noun = f"{len(schema['prefixItems'])} {NOUNS[schema['prefixItems'][0]['type']]}s"
        return f"{noun}, {words(schema).partition(', ')[2]}" if "x-rising" in schema else noun
    item = schema["items"]
    least = f", at least {schema['minItems']}" if "minItems" in schema else ""
    limits = f", each {words(item)}" if words(item) else ""
    return f"list of {NOUNS[item.get('type', 'string')]}s{least}{limits}"


def literal(value: Any) -> str:
    """Format a value as TOML."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else str(value)


def with_tables(page: str) -> str:
    """Replace the option tables in a page by those of the code."""
    sections = schema_of(Recipe)["properties"]
    known = {name: schema_of(component) for name, component in COMPONENTS.items()}
    known |= {f"[{name}]": section for name, section in sections.items()}
    known["detection"] = schema_of(DetectionOptions)
    known["recipe"] = {"properties": {k: v for k, v in sections.items() if v["type"] != "object"}}

    def table(found: re.Match[str]) -> str:
        return f"{found[1]}\n\n{option_table(known[found[2]])}\n\n<!-- end -->"

    return re.sub(r"(<!-- options: (\S+) -->)\n.*?<!-- end -->", table, page, flags=re.DOTALL)


def main() -> None:
    """Write ``catalogue.json`` and the option tables of all pages."""
    text = json.dumps(catalogue(), ensure_ascii=False, indent=1)
    Path(__file__).with_name("catalogue.json").write_text(text + "\n", "utf-8")
    for page in Path("docs").rglob("*.md"):
        page.write_text(with_tables(page.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
