"""The example prompts that an engine ships, and what its model knows where that is little."""

from dataclasses import dataclass
from pathlib import Path

from ddtree_trt.artifact.files import EXAMPLES
from ddtree_trt.errors import ArtifactError, UsageError
from ddtree_trt.reading import Source, read_json, read_record


@dataclass(frozen=True)
class Examples:
    prompts: tuple[str, ...]  # a user's messages that the engine answers well
    knows: str | None = None  # the only kinds of prompts that the model was trained on; None: a model for any text

    def prompt(self, number: int) -> str:
        """The example of that number, from 1. Raises UsageError where there is none."""
        if not 1 <= number <= len(self.prompts):
            found = f"from 1 to {len(self.prompts)}, not {number}"
            raise UsageError(f"--example must be {found}; --list-examples shows them")
        return self.prompts[number - 1]


def read_examples(directory: Path) -> Examples | None:
    """The examples of an engine directory; None for an engine that ships none. Raises ArtifactError."""
    path = directory / EXAMPLES
    if not path.exists():
        return None
    source = Source(str(path), ArtifactError, "rebuild the engine")
    return read_record(Examples, read_json(path, source), source)


def required_examples(directory: Path) -> Examples:
    """As `read_examples`; raises UsageError for an engine that ships none."""
    examples = read_examples(directory)
    if examples is None:
        raise UsageError(f"{directory} ships no examples: only engines of the packaged pairs do; give --prompt")
    return examples
