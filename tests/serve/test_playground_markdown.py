"""The playground's Markdown: what it makes of a text, and that nothing else can come of one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from playground_page import Page, open_browser
from serving import thread_server

RENDERED = [
    (
        "a **b** *c* ***d*** `e*f*`",
        "<p>a <strong>b</strong> <em>c</em> <strong><em>d</em></strong> <code>e*f*</code></p>",
    ),
    ("6 * 3 * 2\nsnake_case __init__", "<p>6 * 3 * 2\nsnake_case __init__</p>"),
    ("# A\nb\n\n---\nc", "<h4>A</h4><p>b</p><hr><p>c</p>"),
    ("- a\n- b\n  - c\n\nd", "<ul><li><p>a</p></li><li><p>b</p><ul><li><p>c</p></li></ul></li></ul><p>d</p>"),
    ("3. a\n   still\n4. b", '<ol start="3"><li><p>a\nstill</p></li><li><p>b</p></li></ol>'),
    ("1. a\n- b", '<ol start="1"><li><p>a</p></li></ol><ul><li><p>b</p></li></ul>'),
    ("> a\n> - b", "<blockquote><p>a</p><ul><li><p>b</p></li></ul></blockquote>"),
    ("```python\nif *x*:\n    # y\n```\nz", "<pre><code>if *x*:\n    # y\n</code></pre><p>z</p>"),
    ("```\nopen", "<pre><code>open\n</code></pre>"),  # while the answer grows
    ("[a](https://b.c)", '<p><a href="https://b.c" target="_blank" rel="noopener noreferrer">a</a></p>'),
    ("[a](javascript:alert)", "<p>[a](javascript:alert)</p>"),
    ("<img src=x onerror=alert()>", "<p>&lt;img src=x onerror=alert()&gt;</p>"),
    ("", ""),
]
# Renders each source; gives the HTML, and the pieces of text that were asked for.
RENDER = """
const [sources, done] = arguments;
import("/playground/markdown.js").then(({ markdown }) => done(sources.map((source) => {
  const pieces = [];
  const box = document.createElement("div");
  box.append(...markdown(source, (from, to) => (pieces.push([from, to]), [source.slice(from, to)])));
  const names = [...box.querySelectorAll("*")].map((each) => each.localName);
  return { html: box.innerHTML, pieces, names };
})));
"""


# What would take a careless renderer for ever, or to the end of its stack.
HOSTILE = ["> " * 20_000 + "a", "1. " * 20_000 + "a", "`" * 20_000, "*a " * 20_000, "[" * 20_000, "* " * 20_000 + "a"]


@pytest.fixture(scope="module")
def page(tiny_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with (
        thread_server(tiny_engine, playground=True) as server,
        open_browser(tmp_path_factory.mktemp("browser")) as browser,
    ):
        yield Page(browser, server.url)


def rendered(page: Page, sources: list[str]) -> list[dict[str, Any]]:
    return list(page.browser.execute_async_script(RENDER, sources))


def test_markdown_is_rendered(page: Page) -> None:
    assert [each["html"] for each in rendered(page, [source for source, _ in RENDERED])] == [
        html for _, html in RENDERED
    ]


def test_hostile_markdown_is_rendered_too(page: Page) -> None:
    assert all(each["names"] for each in rendered(page, HOSTILE))


def test_whatever_is_written_only_these_elements_are_made_and_no_word_is_lost_or_moved(page: Page) -> None:
    random = Random(0)
    marks = [
        "*",
        "**",
        "`",
        "```",
        "\n",
        "\n\n",
        "  ",
        "- ",
        "1. ",
        "> ",
        "# ",
        "[",
        "](https://x.y)",
        "---",
        "<b>",
        "word",
    ]
    sources = ["".join(random.choices(marks, k=random.randint(1, 60))) for _ in range(1500)]
    for source, made in zip(sources, rendered(page, sources), strict=True):
        assert set(made["names"]) <= {*"p h4 ul ol li pre code blockquote hr em strong a".split()}, source
        ends = [0, *(place for piece in made["pieces"] for place in piece)]
        assert ends == sorted(ends), source
        shown = "".join(source[begin:end] for begin, end in made["pieces"])
        assert shown.count("<b>") <= source.count("<b>"), source
        if "```" not in source and "](" not in source:
            assert shown.count("word") == source.count("word"), source
