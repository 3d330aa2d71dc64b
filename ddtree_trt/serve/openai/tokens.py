"""Texts and bytes of single tokens for clients, also of tokens that hold a part of a character."""

from __future__ import annotations

import codecs
from functools import lru_cache

from transformers.convert_slow_tokenizer import bytes_to_unicode

from ddtree_trt.runtime.text.codec import INCOMPLETE, TextCodec


class TokenTexts:
    """Text and bytes of each token of a vocabulary."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._added = frozenset(codec.tokenizer.added_tokens_decoder)
        self._special = frozenset(codec.tokenizer.all_special_ids)
        backend = getattr(codec.tokenizer, "backend_tokenizer", None)
        byte_level = backend is not None and type(backend.decoder).__name__ == "ByteLevel"
        self._bytes_of = {c: b for b, c in bytes_to_unicode().items()} if byte_level else {}
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
        if self._bytes_of and token not in self._added:
            spelled = self._codec.tokenizer.convert_ids_to_tokens(token)
            if spelled is not None and all(c in self._bytes_of for c in spelled):
                return bytes(self._bytes_of[c] for c in spelled)
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
