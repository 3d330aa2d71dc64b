"""The tokenizer of a GGUF file: tokens as transformers makes them of the same file, and as the tokenizers library does
with the steps that the model's own tokenizer.json has."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from checkpoints import make_drafter, make_target
from gguf_files import TOKENIZER, make_gguf
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from ddtree_trt import LLM
from ddtree_trt.build.checkpoint.reader import load_config
from ddtree_trt.build.checkpoint.tokenizer import copy_tokenizer, find_tokenizer, open_tokenizer
from ddtree_trt.build.compile import BuildRequest, compile_engine
from ddtree_trt.errors import CheckpointError

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USER = "<think>"
SIZE = 700
TEXTS = [
    "Hello world, it's 2024: 12 apples, 3.14 and 1000000.",
    "  two spaces,   three\n\n\tdef f(x):\n        return x + 1  # 'll WE'LL\r\n",
    "日本語 😀 émigré naïve cafe\u0301 \u00a0x",
    "<|im_start|>user\nhi <think>there<|im_end|>\n",
    "tabs\t\tand trailing   ",
    "",
]
SPACES_BEFORE_DIGITS = "list:\n   1. one\n  22. two"  # here splitting by digits first makes a difference


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    """A byte-level BPE of this folder's text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE - 1, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    texts = [file.read_text(encoding="utf-8") for file in sorted(Path(__file__).parent.glob("*.py"))]
    tokenizer.train_from_iterator([*texts, *TEXTS * 5], trainer)
    return tokenizer


def words_of(trained: Tokenizer, pre: str | None, **others: Any) -> dict[str, Any]:
    """Metadata of that tokenizer, its text split as `pre` names it."""
    model = json.loads(trained.to_str())["model"]
    tokens = [*sorted(model["vocab"], key=model["vocab"].__getitem__), USER]
    types = [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL) - 1) + [4]
    merges = [" ".join(pair) for pair in model["merges"]]
    values = {"pre": pre, "tokens": tokens, "token_type": types, "merges": merges, "bos_token_id": 1, "eos_token_id": 2}
    return {f"{TOKENIZER}{name}": value for name, value in {**values, **others}.items()}


def write(path: Path, metadata: dict[str, Any], size: int = SIZE) -> Path:
    return make_gguf(make_target(path / "target", vocab_size=size), path / "model.gguf", metadata=metadata)


def opened(file: Path) -> Any:
    """The file's tokenizer as the runtime loads it."""
    folder = file.parent / "engine"
    folder.mkdir()
    copy_tokenizer(find_tokenizer(file), file, (), folder)
    return open_tokenizer(folder, file, load_config(file).dims.vocab_size)


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2"])
def test_tokens_are_those_of_transformers(pre: str, trained: Tokenizer, tmp_path: Path) -> None:
    file = write(tmp_path, words_of(trained, pre, add_bos_token=False, padding_token_id=2))
    ours = opened(file)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    for text in TEXTS:
        text = text.replace("e\u0301", "é")  # transformers does not normalise
        found = ours(text).input_ids
        assert found == theirs(text).input_ids, text
        assert ours.decode(found) == text
    assert ours.get_vocab() == theirs.get_vocab()
    assert (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id) == (1, 2, 2)
    assert ours.decode(ours("".join(SPECIAL) + USER).input_ids, skip_special_tokens=True) == USER


@pytest.fixture(scope="module")
def digits(trained: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Tokenizer]:
    """SmolLM's: ours, and the tokenizers library's of the same steps."""
    theirs = Tokenizer.from_str(trained.to_str())
    theirs.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    theirs.decoder = decoders.ByteLevel()
    theirs.add_tokens([USER])
    return opened(write(tmp_path_factory.mktemp("digits"), words_of(trained, "smollm"))), theirs


@given(text=st.text(st.sampled_from(" \n\tab1290'.,é日😀") | st.characters(exclude_categories=["Cs"])))
def test_digits_are_single(text: str, digits: tuple[Any, Tokenizer]) -> None:
    ours, theirs = digits
    for whole in (text, text + SPACES_BEFORE_DIGITS):
        assert ours(whole).input_ids == theirs.encode(whole).ids
        assert ours.decode(ours(whole).input_ids, skip_special_tokens=False) == whole


def test_qwen_normalises(trained: Tokenizer, tmp_path: Path) -> None:
    composed, apart = normalizers.NFC().normalize_str("cafe\u0301"), "cafe\u0301"
    qwen, other = (opened(write(tmp_path / pre, words_of(trained, pre))) for pre in ("qwen2", "llama-bpe"))
    assert qwen(apart).input_ids == qwen(composed).input_ids
    assert other(apart, add_special_tokens=False).input_ids != other(composed, add_special_tokens=False).input_ids


def test_marks_are_part_of_words_from_qwen_3_5_on(trained: Tokenizer, tmp_path: Path) -> None:
    mark = "\N{THAI CHARACTER KO KAI}\N{THAI CHARACTER MAI HAN-AKAT}\N{THAI CHARACTER NO NU}!"
    for pre, pieces in (("qwen2", [(0, 1), (1, 3), (3, 4)]), ("qwen35", [(0, 3), (3, 4)])):
        split = opened(write(tmp_path / pre, words_of(trained, pre))).backend_tokenizer.pre_tokenizer
        assert [place for _, place in split.pre_tokenize_str(mark)] == pieces


def test_llama_3_takes_whole_pieces_first_and_begins_texts(trained: Tokenizer, tmp_path: Path) -> None:
    metadata = words_of(trained, "llama-bpe", add_bos_token=None)
    tokens, merges = metadata[f"{TOKENIZER}tokens"], metadata[f"{TOKENIZER}merges"]
    whole = next(t for t in tokens if t.isalpha() and t.isascii() and len(t) == 4)
    without = [merge for merge in merges if merge.replace(" ", "") != whole]
    ours = opened(write(tmp_path, {**metadata, f"{TOKENIZER}merges": without}))
    assert ours.convert_ids_to_tokens(ours(whole).input_ids) == ["<|im_start|>", whole]
    assert ours.convert_ids_to_tokens(ours(whole, add_special_tokens=False).input_ids) == [whole]


@pytest.mark.parametrize(("begin", "end"), [(True, False), (False, True), (True, True)])
def test_tokens_around_a_text(begin: bool, end: bool, trained: Tokenizer, tmp_path: Path) -> None:
    ours = opened(write(tmp_path, words_of(trained, "gpt-2", add_bos_token=begin, add_eos_token=end)))
    plain = ours("hello", add_special_tokens=False).input_ids
    assert ours("hello").input_ids == [1] * begin + plain + [2] * end
    assert ours("hello", "hello").input_ids == ours("hello").input_ids * 2


def test_unused_tokens_are_no_words(trained: Tokenizer, tmp_path: Path) -> None:
    metadata = words_of(trained, "llama-bpe", add_bos_token=False)
    metadata[f"{TOKENIZER}tokens"][-1], metadata[f"{TOKENIZER}token_type"][-1] = "[PAD699]", 5
    ours = opened(write(tmp_path, metadata))
    assert SIZE - 1 not in ours("[PAD699]").input_ids and "[PAD699]" not in ours.get_vocab()


def test_an_engine_has_the_files_template(trained: Tokenizer, tmp_path: Path) -> None:
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    file = write(tmp_path, {**words_of(trained, "smollm"), "tokenizer.chat_template": template})
    drafter = make_drafter(tmp_path / "drafter", vocab_size=SIZE)
    manifest = compile_engine(BuildRequest(checkpoint=file, drafter=drafter, output=tmp_path / "built"))
    assert manifest.stop_token_ids == (2,) and manifest.name == "model"
    with LLM(tmp_path / "built") as llm:
        text = llm.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "'tokenizer.ggml.model' is missing, the file has no tokenizer"),
        ({"model": "llama"}, "is 'llama', a SentencePiece vocabulary; only 'gpt2' can be converted"),
        ({"pre": "viking"}, "'tokenizer.ggml.pre' is 'viking'; known are gpt-2, smollm, llama-bpe"),
        ({"pre": None}, "'tokenizer.ggml.pre' is missing, as older converters left it; known are"),
        ({"merges": ["a b c"]}, "'tokenizer.ggml.merges' must have two pieces each, found 'a b c'"),
        ({"token_type": [1, 1]}, "'tokenizer.ggml.token_type' has 2 entries for 700 tokens"),
        ({"tokens": ["a"] * 700}, "'tokenizer.ggml.tokens' has 699 of its tokens twice"),
        ({"bos_token_id": 900}, "'tokenizer.ggml.bos_token_id' must be an integer from 0 to 699, found 900"),
        ({"bos_token_id": None, "add_bos_token": True}, "add_bos_token' is true, but no bos_token_id is there"),
    ],
)
def test_others_are_refused(changes: dict[str, Any], message: str, trained: Tokenizer, tmp_path: Path) -> None:
    file = write(tmp_path, words_of(trained, **{"pre": "gpt-2", **changes}))
    with pytest.raises(CheckpointError) as caught:
        find_tokenizer(file)
    assert message in str(caught.value)
    assert str(caught.value).endswith("; use the Hugging Face checkpoint of this model")


def test_more_tokens_than_rows(trained: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has token 699, the target's vocab_size is 600; fetch the tokenizer"):
        opened(write(tmp_path, words_of(trained, "gpt-2"), size=600))
