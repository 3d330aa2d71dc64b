"""Every default of the recipe, in one place."""

from dataclasses import dataclass, field, replace

from ddtree_trt.models.delta import DeltaNet
from tools.train_drafter.settings import DataSettings, DrafterSettings, Schedule, ValidationSettings

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>", "<|mask|>")
EOS, PAD, MASK = 2, 3, 4


@dataclass(frozen=True)
class CorpusSettings:
    conversations: int = 150_000
    prompts_per_domain: int = 20
    longest_of: int = 6  # a prompt is the one of so many with the longest answer: a generation is to span many rounds
    held_out_per_domain: int = 100
    seed: int = 1


_TARGET = Schedule(
    adam_rate=3e-3, muon_rate=0.02, weight_decay=0.05, warmup=40, decay=0.65, seconds=4300.0, micro_batches=6,
    check_s=540.0,
)  # fmt: skip
_DRAFTER = Schedule(
    adam_rate=2e-3, muon_rate=0.01, weight_decay=0.05, warmup=30, decay=0.65, seconds=1500.0, micro_batches=4,
    check_s=300.0,
)  # fmt: skip
_DATA = DataSettings(temperatures=((0.0, 0.75), (1.0, 0.25)), max_new=320, top_k=2048)
"""Three greedy answers for one at temperature 1, which chooses from the whole vocabulary."""
_VALIDATION = ValidationSettings(prompts=24, max_new=320)


@dataclass(frozen=True)
class TargetSettings:
    vocabulary: int = 2048
    hidden: int = 192
    inner: int = 512
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    tokens_per_micro: int = 700
    seed: int = 0
    schedule: Schedule = _TARGET
    delta: DeltaNet | None = None  # of a hybrid, which begins as the packaged target where tensors have the same use
    imitated: float = 0.0  # share of the training in which a hybrid's layers imitate the packaged target's, one by one


DFLASH = DrafterSettings(
    block=16, short_block=16, layers=2, taps=(1, 3, 4), tap_dropout=0.0, sequences=3, position_decay=7.0,
    label_share=1.0, dtype="float16", schedule=_DRAFTER,
)  # fmt: skip
DSPARK = replace(
    DFLASH, kind="dspark", markov_rank=16, frozen=True, schedule=replace(_DRAFTER, adam_rate=4e-3, seconds=660.0)
)
EAGLE3 = replace(
    # Small, so that this drafter and DSpark's have less than 3 MB together; a decay of 0.8 a step, as in the paper's
    # code.
    DFLASH, kind="eagle3", block=6, short_block=6, inner=128, layers=1, anchors=48, position_decay=4.5,
    schedule=replace(_DRAFTER, seconds=2150.0),
)  # fmt: skip


@dataclass(frozen=True)
class EvaluationSettings:
    budgets: tuple[int, ...] = (8, 16, 32, 64)
    max_new_tokens: int = 320
    temperatures: tuple[float, ...] = (0.0, 1.0)


@dataclass(frozen=True)
class Settings:
    corpus: CorpusSettings = field(default_factory=CorpusSettings)
    target: TargetSettings = field(default_factory=TargetSettings)
    data: DataSettings = _DATA
    pools: int = 12
    corpus_share: float = 0.25  # of a pool's prompts, as many conversations of the corpus besides
    drafters: dict[str, DrafterSettings] = field(
        default_factory=lambda: {"drafter": DFLASH, "dspark": DSPARK, "eagle3": EAGLE3}
    )
    validation: ValidationSettings = _VALIDATION
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)


_DELTA = DeltaNet(key_heads=2, value_heads=4, key_dim=64, value_dim=64, taps=4, attention_layers=(2, 5))
HYBRID = Settings(
    target=TargetSettings(delta=_DELTA, imitated=0.5, schedule=replace(_TARGET, warmup=10, micro_batches=1)),
    drafters={"drafter": DFLASH},
)
