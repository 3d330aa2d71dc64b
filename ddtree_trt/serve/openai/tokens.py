"""Texts and bytes of single tokens for clients, also of tokens that hold a part of a character."""

from __future__ import annotations

import codecs
from functools import lru_cache

from ddtree_trt.runtime.text.codec import INCOMPLETE, TextCodec


def _byte_alphabet() -> dict[str, int]:
    """The printable characters byte-level BPE spells bytes with (GPT-2's table): bytes that are printable in Latin-1
    stand for themselves, the others follow from U+0100 on in rising order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(rest)}


class TokenTexts:
    """Text and bytes of each token of a vocabulary."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._added = frozenset(codec.tokenizer.added_tokens_decoder)
        self._special = frozenset(codec.tokenizer.all_special_ids)
        backend = getattr(codec.tokenizer, "backend_tokenizer", None)
        byte_level = backend is not None and type(backend.decoder).__name__ == "ByteLevel"
        self._alphabet = _byte_alphabet() if byte_level else {}
        self.of = lru_cache(maxsize=1 << 16)(self._of)

    def _of(self, token: int) -> tuple[str, bytes | None]:
        """The token's text and its bytes; the text of bytes that are not whole characters is spelled as OpenAI does,
        "bytes:\\xe2\\x80". Bytes are None where the tokenizer does not give them."""
        raw = self._bytes(token)
        if raw is None:
            return self._codec.decode([token], skip_special_tokens=False), None
        try:
            return raw.decode(), raw
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in raw), raw

    def _bytes(self, token: int) -> bytes | None:
        if self._alphabet and token not in self._added:
            spelled = self._codec.tokenizer.convert_ids_to_tokens(token)
            if spelled is not None and all(c in self._alphabet for c in spelled):
                return bytes(self._alphabet[c] for c in spelled)
        text = self._codec.decode([token], skip_special_tokens=False)
        return None if INCOMPLETE in text else text.encode()

    def is_special(self, token: int) -> bool:
        return token in self._special


class TextOffsets:
    """Offsets, in characters, at which the tokens of one completion begin in its text."""

    def __init__(self, texts: TokenTexts, *, skip_special_tokens: bool) -> None:
        self._texts = texts
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def next(self, token: int) -> int:
        """The offset of the next token; one that completes a character begins where the character does."""
        start = self._offset
        if not (self._skip_special_tokens and self._texts.is_special(token)):
            text, raw = self._texts.of(token)
            self._offset += len(text if raw is None else self._decoder.decode(raw))
        return start
