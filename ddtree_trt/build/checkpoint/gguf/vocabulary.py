"""The tokenizer inside a GGUF file, as the tokenizer.json and tokenizer_config.json that say the same.

Only byte-level BPE, which GGUF calls gpt2. How text is split before its pieces are merged is in a file by a name alone;
what the names stand for is stated here, as the models' own tokenizer.json have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ddtree_trt.models.decoder import TOKEN
from ddtree_trt.reading import Between, Fields, shown

_MODEL, _BYTE_LEVEL_BPE = "tokenizer.ggml.model", "gpt2"
_PRE, _TOKENS, _TYPES, _MERGES = (f"tokenizer.ggml.{name}" for name in ("pre", "tokens", "token_type", "merges"))
_TEMPLATE = "chat_template"
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # types of tokens; those of text are 1
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _byte_level(**options: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True, **options}


def _sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def _split(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return _sequence(split, _byte_level(use_regex=False))


def _words(numbers: str) -> str:
    """Contractions, words, numbers, punctuation, line ends and spaces, each with what goes before it."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + numbers
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


@dataclass(frozen=True)
class _Splitting:
    """What one of GGUF's names for a way of splitting text stands for."""

    pre_tokenizer: Mapping[str, Any]
    nfc: bool = False  # text is normalised first
    whole_first: bool = False  # a piece that is a token is not merged from bytes
    begins: bool = False  # a file that does not say has its first token put before every text


_GPT2 = _Splitting(_byte_level())
_DIGITS = _Splitting(_sequence({"type": "Digits", "individual_digits": True}, _byte_level()))
_LLAMA3 = _Splitting(_split(_words(r"\p{N}{1,3}")), whole_first=True, begins=True)
_QWEN2 = _Splitting(_split(_words(r"\p{N}")), nfc=True)
_SPLITTINGS: Mapping[str, _Splitting] = {
    "gpt-2": _GPT2,
    "smollm": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


@dataclass(frozen=True)
class Vocabulary:
    """A byte-level BPE tokenizer."""

    tokens: list[str]  # by id
    types: list[int]
    merges: list[list[str]]  # pairs, first ones first
    splitting: _Splitting
    special: Mapping[str, str]  # transformers' name of a part → the token that has it
    before: str | None  # the token before every text
    after: str | None  # and the one behind it
    template: str | None  # of chats
    max_length: int | None

    def files(self) -> dict[str, Any]:
        """File name → JSON content, as transformers reads them."""
        settings: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **self.special,
        }
        if self.max_length is not None:
            settings["model_max_length"] = self.max_length
        if self.template is not None:
            settings[_TEMPLATE] = self.template
        return {"tokenizer.json": self._tokenizer(), "tokenizer_config.json": settings}

    def _tokenizer(self) -> dict[str, Any]:
        used = [(i, token, kind) for i, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))]
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        added = [
            {"id": i, "content": token, **plain, "special": kind == _CONTROL}
            for i, token, kind in used
            if kind in (_CONTROL, _USER_DEFINED)
        ]
        model = {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": self.splitting.whole_first,
            # Unused ones fill the embedding's last rows; no text has them.
            "vocab": {token: i for i, token, kind in used if kind != _UNUSED},
            "merges": self.merges,
        }
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": {"type": "NFC"} if self.splitting.nfc else None,
            "pre_tokenizer": self.splitting.pre_tokenizer,
            "post_processor": self._post_processor(),
            "decoder": _byte_level(),
            "model": model,
        }

    def _post_processor(self) -> dict[str, Any]:
        """Puts tokens before and behind a text, where there are any."""
        around = [token for token in (self.before, self.after) if token is not None]
        if not around:
            return _byte_level(trim_offsets=False)

        def item(token: str) -> dict[str, Any]:
            return {"SpecialToken": {"id": token, "type_id": 0}}

        def text(name: str) -> list[dict[str, Any]]:
            before = [item(self.before)] if self.before is not None else []
            after = [item(self.after)] if self.after is not None else []
            return [*before, {"Sequence": {"id": name, "type_id": 0}}, *after]

        ids = {t: {"id": t, "ids": [self.tokens.index(t)], "tokens": [t]} for t in around}
        template = {"single": text("A"), "pair": [*text("A"), *text("B")], "special_tokens": ids}
        return {"type": "TemplateProcessing", **template}


def read_vocabulary(metadata: Fields) -> Vocabulary:
    """The tokenizer that a GGUF file's metadata has. Raises CheckpointError for what is missing, cannot be right, or is
    of a kind that is not supported."""
    metadata = Fields(metadata.data, replace(metadata.source, advice="use the Hugging Face checkpoint of this model"))
    splitting = _splitting(metadata)
    tokens = metadata.value(_TOKENS, list[str])
    types = metadata.value(_TYPES, list[int], [1] * len(tokens))
    if not tokens or len(types) != len(tokens):
        raise metadata.fault(_TYPES, f"has {len(types)} entries for {len(tokens)} tokens")
    used = [token for token, kind in zip(tokens, types, strict=True) if kind != _UNUSED]
    if len(set(used)) != len(used):
        raise metadata.fault(_TOKENS, f"has {len(used) - len(set(used))} of its tokens twice")
    merges = [merge.split(" ") for merge in metadata.value(_MERGES, list[str])]
    if wrong := [pair for pair in merges if len(pair) != 2]:
        raise metadata.fault(_MERGES, f"must have two pieces each, found {shown(' '.join(wrong[0]))}")
    special = _special_tokens(metadata, tokens)

    def around(part: str, default: bool) -> str | None:
        key = f"tokenizer.ggml.add_{part}_token"
        if not metadata.flag(key, default):
            return None
        if f"{part}_token" not in special:
            raise metadata.fault(key, f"is true, but no {part}_token_id is there")
        return special[f"{part}_token"]

    length = f"{metadata.text('general.architecture', '')}.context_length"
    return Vocabulary(
        tokens=tokens,
        types=types,
        merges=merges,
        splitting=splitting,
        special=special,
        before=around("bos", splitting.begins and "bos_token" in special),
        after=around("eos", False),
        template=metadata.optional(f"tokenizer.{_TEMPLATE}", str),
        max_length=metadata.optional(length, int),
    )


def _splitting(metadata: Fields) -> _Splitting:
    """How text is split. Raises CheckpointError for a tokenizer of another kind than byte-level BPE."""
    if not metadata.has(_MODEL):
        raise metadata.fault(_MODEL, "is missing, the file has no tokenizer")
    model = metadata.text(_MODEL)
    if model != _BYTE_LEVEL_BPE:
        kind = "a SentencePiece vocabulary" if model == "llama" else "no byte-level BPE"
        raise metadata.fault(_MODEL, f"is {shown(model)}, {kind}; only {_BYTE_LEVEL_BPE!r} can be converted")
    name = metadata.text(_PRE, "")
    if name not in _SPLITTINGS:
        what = f"is {shown(name)}" if name else "is missing, as older converters left it"
        raise metadata.fault(_PRE, f"{what}; known are {', '.join(_SPLITTINGS)}")
    return _SPLITTINGS[name]


def _special_tokens(metadata: Fields, tokens: list[str]) -> dict[str, str]:
    """transformers' name of a part → the token that has it."""
    special = {}
    for name, part in _SPECIAL.items():
        key = f"tokenizer.ggml.{part}_token_id"
        if metadata.has(key):
            special[name] = tokens[metadata.integer(key, Between(0, min(len(tokens) - 1, TOKEN.highest)))]
    return special
