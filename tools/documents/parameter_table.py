"""Write the table of sampling parameters in docs/generation.md from the one in ddtree_trt/runtime/params.py.

    python tools/documents/parameter_table.py

The table is the text between `<!-- begin parameters -->` and `<!-- end parameters -->`. A test compares the two.
"""

from pathlib import Path
from typing import Any

from ddtree_trt.runtime.decoding.methods import AUTO, METHODS
from ddtree_trt.runtime.params import BOTH, MAX_SEED, PARAMETERS, Parameter
from ddtree_trt.runtime.values import MAX_INTEGER
from ddtree_trt.triton.layouts import SETS

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "generation.md"
BEGIN, END = "<!-- begin parameters -->\n", "\n<!-- end parameters -->"
HEAD = (
    "| parameter | default | values | meaning | on the device | `run` | HTTP | Triton |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- |\n"
)
ON_DEVICE = {"always": "yes", "greedy": "if greedy", "never": "no"}


def with_table(document: str) -> str:
    """The document with the current table."""
    before, _, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"{DOCUMENT} lacks the lines {BEGIN.strip()} and {END.strip()}; put them around the table")
    return before + BEGIN + table() + END + after


def table() -> str:
    """The table in Markdown."""
    lines = []
    for row in PARAMETERS.values():
        cells = [f"`{row.name}`", _default(row.default), values(row), f"{row.help} {row.more}".strip()]
        cells += [ON_DEVICE[row.device], "" if row.metavar is None else f"`{row.option}`", _http(row)]
        cells.append(", ".join(f"`{name}`" for name, field in SETS.items() if field == row.name))
        lines.append(f"| {' | '.join(cells)} |\n")
    return HEAD + "".join(lines)


def values(row: Parameter) -> str:
    """The values that a parameter takes, in words."""
    if row.name == "method":
        return ", ".join(f"`{name}`" for name in (AUTO, *METHODS))
    bounds = ""
    if row.bounds is not None:
        lowest, highest = row.bounds.lowest, row.bounds.highest
        bounds = f"{lowest} to {'2^64 − 1' if highest == MAX_SEED else highest}".replace("-", "−")
        bounds = f"from {lowest}" if highest == MAX_INTEGER else bounds
    if row.type == dict[int, float]:
        return f"token id → {bounds}"
    words = {bool: "true, false", tuple[str, ...]: "strings", tuple[int, ...]: "token ids"}
    return words.get(row.type) or ("`auto`, " if row.default == "auto" else "") + (bounds or "a constraint")


def _http(row: Parameter) -> str:
    if row.http == BOTH:
        return "both"
    if set(row.http) == set(BOTH) and len(names := {row.http_name(endpoint) for endpoint in row.http}) == 1:
        return f"both, as `{names.pop()}`"
    return ", ".join(e if row.http_name(e) == row.name else f"`{row.http_name(e)}` of {e}" for e in row.http)


def _default(value: Any) -> str:
    if value is None or value == () or value == {}:
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    return f"`{value}`" if isinstance(value, str) else f"{value:g}"


if __name__ == "__main__":
    DOCUMENT.write_text(with_table(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
