"""`ddtree-trt run`: generate from an engine, once or in a chat."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ddtree_trt.artifact.examples import read_examples, required_examples
from ddtree_trt.artifact.files import newest_engine
from ddtree_trt.artifact.manifest import load_manifest
from ddtree_trt.artifact.template_arguments import OPTION, parse_arguments
from ddtree_trt.commands.arguments import NewestByDefault, with_options
from ddtree_trt.errors import UsageError
from ddtree_trt.runtime.decoding.methods import resolve_method
from ddtree_trt.runtime.options import EngineOptions
from ddtree_trt.terminal import printing as terminal


@with_options()
def run(
    engine_dir: NewestByDefault = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="What to complete.")] = None,
    example: Annotated[
        int | None, typer.Option(metavar="N", help="Answer this one of the examples that the engine ships.")
    ] = None,
    list_examples: Annotated[bool, typer.Option("--list-examples", help="Show the engine's examples.")] = False,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="A system message for the chat template.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Give the prompt to the model without its chat template.")] = False,
    chat_template_arg: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="What the chat template is rendered with, over what the engine was built with. May be repeated.",
        ),
    ] = None,
    *,
    sampling: dict[str, Any],
    show_tree: Annotated[bool, typer.Option("--show-tree", help="Draw each round's tree and accepted path.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Also run ar and dflash; check that they agree.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, one line per request.")] = False,
    options: EngineOptions,
) -> None:
    """Generate text with an engine. Without a prompt: reads stdin, or chats when stdin is a terminal."""
    directory = newest_engine() if engine_dir is None else engine_dir
    if list_examples:
        if json or compare or show_tree or raw or chat_template_arg or (prompt, example, system) != (None,) * 3:
            raise UsageError("--list-examples shows the engine's examples; give it alone")
        from ddtree_trt.terminal.console import print_examples

        load_manifest(directory)  # refuses what is no engine
        print_examples(required_examples(directory))
        return
    text = _prompt(directory, prompt, example)
    if text is None and (json or compare or show_tree):
        raise UsageError("--json, --compare and --show-tree need a prompt: give --prompt or stdin")
    if json + compare + show_tree > 1:
        raise UsageError("--json prints JSON, --compare a table of several runs, --show-tree trees; give one of them")

    arguments = parse_arguments(chat_template_arg or ())
    for option, given in ((OPTION, arguments), ("--system", system), ("a chat", text is None)):
        if raw and given:
            raise UsageError(f"{option} needs the chat template, which --raw does without; give it a prompt alone")

    from ddtree_trt.runtime.llm import LLM
    from ddtree_trt.runtime.params import SamplingParams
    from ddtree_trt.runtime.text import chat_template
    from ddtree_trt.terminal import chat, console

    params = SamplingParams.from_mapping(sampling)
    if not raw:
        chat_template.start_for(directory)  # at the same time as the engine is loaded
    with terminal.progress_bars() as progress:
        llm = LLM(directory, options, progress=progress)
    with llm:
        params = replace(params, method=resolve_method(params.method, llm.engine.manifest.drafter_kind).name)
        llm.codec.check_template_kwargs(arguments, OPTION)
        if system and not llm.tokenizer.chat_template:
            raise UsageError("--system needs a chat template, which this engine has not; give a prompt alone")
        examples = read_examples(directory)
        if text is None:
            chat.Chat(llm, params, system, arguments, examples).converse()
            return
        request: Any = text
        if not raw and llm.tokenizer.chat_template:
            head = [{"role": "system", "content": system}] if system else []
            request = [*head, {"role": "user", "content": text}]
        if arguments:
            request = llm.codec.encode(request, arguments)
        if compare:
            console.compare(llm, request, params)
        elif json:
            console.print_output_json(llm.generate(request, params, use_tqdm=False)[0])
        else:
            for _ in console.stream(llm, request, params, show_tree=show_tree):
                pass  # it prints
        if not (json or raw):
            console.hint(text, examples)


def _prompt(directory: Path, prompt: str | None, example: int | None) -> str | None:
    """The prompt's text, or None to chat."""
    if example is not None:
        if prompt is not None:
            raise UsageError("--example is a prompt; give it without --prompt")
        text = required_examples(directory).prompt(example)
        for line in text.splitlines():  # on stderr, since it is no result
            terminal.print_note(f"> {line}")
        return text
    if prompt is not None or sys.stdin.isatty():
        return prompt
    text = sys.stdin.read()
    if not text.strip():
        raise UsageError("stdin has no prompt; write one there, or give --prompt")
    return text
