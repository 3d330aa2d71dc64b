"""Texts and bytes of single tokens for clients, also of tokens that hold a part of a character."""

import re
from functools import lru_cache

from transformers.convert_slow_tokenizer import bytes_to_unicode

from ddtree_trt.runtime.text.codec import INCOMPLETE, TextCodec, TextStream

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # a token of one byte, where the tokenizer falls back to bytes


class TokenTexts:
    """Text and bytes of each token of a vocabulary."""

    def __init__(self, codec: TextCodec) -> None:
        self.codec = codec
        self._added = frozenset(codec.tokenizer.added_tokens_decoder)
        byte_level = type(codec.tokenizer.backend_tokenizer.decoder).__name__ == "ByteLevel"
        self._bytes_of = {c: b for b, c in bytes_to_unicode().items()} if byte_level else {}
        self.of = lru_cache(maxsize=1 << 16)(self._of)

    def _of(self, token: int) -> tuple[str, bytes | None]:
        """The token's text and its bytes; the text of bytes that are not whole characters is spelled as OpenAI does,
        "bytes:\\xe2\\x80". Bytes are None where the tokenizer does not give them."""
        raw = self._bytes(token)
        if raw is None:
            return self._text(token), None
        try:
            return raw.decode(), raw
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in raw), raw

    def _bytes(self, token: int) -> bytes | None:
        spelled = self.codec.tokenizer.convert_ids_to_tokens(token) or ""
        if self._bytes_of and token not in self._added and all(c in self._bytes_of for c in spelled):
            return bytes(self._bytes_of[c] for c in spelled)
        text = self._text(token)
        if INCOMPLETE not in text:
            return text.encode()
        byte = _BYTE.fullmatch(spelled)
        return bytes.fromhex(byte[1]) if byte else None

    def _text(self, token: int) -> str:
        """Behind another token: at a text's beginning, decoders may leave out a space."""
        once, twice = (self.codec.decode([token] * count, skip_special_tokens=False) for count in (1, 2))
        return twice[len(once) :]


class TextOffsets:
    """Offsets, in characters, at which the tokens begin of a text; of one that follows another, `start` is where."""

    def __init__(self, codec: TextCodec, *, skip_special_tokens: bool, start: int | None = None) -> None:
        self._stream = TextStream(codec, skip_special_tokens=skip_special_tokens, begins=start is None)
        self._start = start or 0

    def next(self, token: int) -> int:
        """The offset of the next token; one that completes a character begins where the character does."""
        offset = self._start + len(self._stream.text)
        self._stream.push([token])
        return offset
