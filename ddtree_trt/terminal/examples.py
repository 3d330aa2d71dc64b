"""The examples of an engine on the terminal, and the hint for a prompt that its model does not know."""

from __future__ import annotations

import re
import sys

from ddtree_trt.artifact.examples import Examples
from ddtree_trt.reading import printable
from ddtree_trt.runtime.text.codec import TextCodec
from ddtree_trt.terminal.printing import print_note

_WORD = re.compile(r"(?<![A-Za-z])[a-z]{2,}")  # names, which begin with a capital, are made up
MOST_UNKNOWN = 1 / 3  # of a prompt's words


def print_examples(examples: Examples) -> None:
    """Print the examples with their numbers."""
    width = len(str(len(examples.prompts)))
    for number, prompt in enumerate(examples.prompts, 1):
        first, *more = prompt.splitlines()
        print(f"{number:>{width}}  {printable(first)}")
        for line in more:
            print(f"{'':{width}}  {printable(line)}")


def print_question(prompt: str) -> None:
    """Print a prompt that the user did not write, on stderr, since it is no result."""
    for line in prompt.splitlines():
        print(f"> {printable(line)}", file=sys.stderr, flush=True)


def is_far(prompt: str, examples: Examples, codec: TextCodec) -> bool:
    """Whether a prompt is far from what a model of few kinds of texts was trained on: shorter than every example, or
    more than a third of its words are none that the tokenizer, made from the same texts, has whole."""
    if len(prompt.split()) < min(len(each.split()) for each in examples.prompts):
        return True
    words = _WORD.findall(prompt)
    unknown = [word for word in words if all(len(codec.encode(form)) > 1 for form in (word, f" {word}"))]
    return len(unknown) > MOST_UNKNOWN * len(words)


def hint_if_far(prompt: str, examples: Examples | None, codec: TextCodec) -> bool:
    """Print one line for a prompt that is far from all that the engine's model knows; returns whether it did."""
    if examples is None or examples.knows is None or not is_far(prompt, examples, codec):
        return False
    sys.stdout.flush()  # the answer comes first, also where both go into one file
    print_note(f"hint: this model knows only {examples.knows}; --list-examples shows prompts, --example answers one")
    return True
