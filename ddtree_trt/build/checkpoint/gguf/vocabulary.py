"""The tokenizer inside a GGUF file, as the tokenizer.json and tokenizer_config.json that say the same.

Only byte-level BPE, which GGUF calls gpt2. How text is split before its pieces are merged is in a file by a name alone;
what the names stand for is stated here, as the models' own tokenizer.json have it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddtree_trt.models.decoder import TOKEN
from ddtree_trt.reading import Between, Fields, shown

_MODEL, _BYTE_LEVEL_BPE = "tokenizer.ggml.model", "gpt2"
_PRE, _TOKENS, _TYPES, _MERGES = (f"tokenizer.ggml.{name}" for name in ("pre", "tokens", "token_type", "merges"))
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # types of tokens; those of text are 1
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _words(numbers: str, marks: str = "") -> str:
    """Contractions, words, numbers, punctuation, line ends and spaces, each with what goes before it. `marks` are part
    of words, as letters are."""
    return (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}{marks}]+|{numbers}"
        rf"| ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


@dataclass(frozen=True)
class _Splitting:
    """What one of GGUF's names for a way of splitting text stands for."""

    pattern: str | None = None  # of pieces; None: GPT-2's
    digits: bool = False  # each stands alone
    nfc: bool = False  # text is normalised first
    whole_first: bool = False  # a piece that is a token is not merged from bytes
    begins: bool = False  # a file that does not say has its first token put before every text


_LLAMA3 = _Splitting(_words(r"\p{N}{1,3}"), whole_first=True, begins=True)
_QWEN2 = _Splitting(_words(r"\p{N}"), nfc=True)
_SPLITTINGS: Mapping[str, _Splitting] = {
    "gpt-2": _Splitting(),
    "smollm": _Splitting(digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "qwen35": _Splitting(_words(r"\p{N}", r"\p{M}"), nfc=True),
}


def tokenizer_files(metadata: Fields) -> dict[str, Any]:
    """File name → JSON content, as transformers reads them, of the tokenizer that a GGUF file's metadata has. Raises
    CheckpointError for what is missing, cannot be right, or is of a kind that is not supported."""
    metadata = metadata.advising("use the Hugging Face checkpoint of this model")
    split = _splitting(metadata)
    tokens = metadata.value(_TOKENS, list[str])
    types = metadata.value(_TYPES, list[int], [1] * len(tokens))
    if not tokens or len(types) != len(tokens):
        raise metadata.fault(_TYPES, f"has {len(types)} entries for {len(tokens)} tokens")
    # Unused ones fill the embedding's last rows; no text has them.
    used = [(token, i) for i, token in enumerate(tokens) if types[i] != _UNUSED]
    if twice := len(used) - len(dict(used)):
        raise metadata.fault(_TOKENS, f"has {twice} of its tokens twice")
    merges = [tuple(merge.split(" ")) for merge in metadata.value(_MERGES, list[str])]
    if wrong := [pair for pair in merges if len(pair) != 2]:
        raise metadata.fault(_MERGES, f"must have two pieces each, found {shown(' '.join(wrong[0]))}")
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, part in _SPECIAL.items():
        key = f"tokenizer.ggml.{part}_token_id"
        if metadata.has(key):
            settings[name] = tokens[metadata.integer(key, Between(0, min(len(tokens) - 1, TOKEN.highest)))]
    positions = f"{metadata.text('general.architecture', '')}.context_length"
    for name, key, kind in (("model_max_length", positions, int), ("chat_template", "tokenizer.chat_template", str)):
        if (value := metadata.optional(key, kind)) is not None:
            settings[name] = value
    around: dict[str, list[Any]] = {}  # the token before every text, and the one behind it
    for part, default in (("bos", split.begins and "bos_token" in settings), ("eos", False)):
        key = f"tokenizer.ggml.add_{part}_token"
        around[part] = [settings.get(f"{part}_token")] if metadata.flag(key, default) else []
        if None in around[part]:
            raise metadata.fault(key, f"is true, but no {part}_token_id is there")
    added = [(token, kind) for token, kind in zip(tokens, types, strict=True) if kind in (_CONTROL, _USER_DEFINED)]
    try:
        tokenizer = _tokenizer(dict(used), merges, added, split, [around["bos"], around["eos"]])
    except Exception as error:  # tokenizers raises nothing more special
        raise metadata.fault(_MERGES, f"cannot be used ({error})") from error
    return {"tokenizer.json": json.loads(tokenizer), "tokenizer_config.json": settings}


def _tokenizer(
    vocabulary: dict[str, int], merges: list[Any], added: list[tuple[str, int]], split: _Splitting, around: list[Any]
) -> str:
    """tokenizer.json of a byte-level BPE."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=split.whole_first))
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=kind == _CONTROL) for token, kind in added])
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    digits = [pre_tokenizers.Digits(individual_digits=True)] if split.digits else []
    pieces = [pre_tokenizers.Split(Regex(split.pattern), "isolated")] if split.pattern else []
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pieces)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, *pieces, letters])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    before, after = around
    if before or after:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *before, "$B", *after],
            special_tokens=[(token, vocabulary[token]) for token in {*before, *after}],
        )
    return tokenizer.to_str()


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
