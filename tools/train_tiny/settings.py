"""Every default of the recipe, in one place; the command line reads them from here."""

from __future__ import annotations

from dataclasses import dataclass, field

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>", "<|mask|>")
IM_START = 1
EOS = 2
PAD = 3
MASK = 4


@dataclass(frozen=True)
class CorpusSettings:
    conversations: int = 150_000
    prompts_per_domain: int = 20
    longest_of: int = 6  # a prompt is the one of so many with the longest answer: a generation is to span many rounds
    held_out_per_domain: int = 100
    seed: int = 1


@dataclass(frozen=True)
class TargetSettings:
    """Shape and training of the target. Rates are the peak; they fall linearly to zero after the plateau."""

    vocabulary: int = 2048
    hidden: int = 192
    inner: int = 512
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    seconds: float = 4300.0
    adam_rate: float = 3e-3
    muon_rate: float = 0.02
    weight_decay: float = 0.05
    warmup_steps: int = 40
    plateau: float = 0.35
    tokens_per_micro: int = 700
    micro_batches: int = 6
    checkpoint_s: float = 540.0
    seed: int = 0


@dataclass(frozen=True)
class DraftDataSettings:
    """Sequences on which the drafter learns. One in `sampled_one_in` continuations is at temperature 1."""

    seconds: float = 240.0
    batch: int = 96
    sampled_one_in: int = 4
    corpus_share: float = 0.25
    max_tokens: int = 420
    seed: int = 0


@dataclass(frozen=True)
class DrafterSettings:
    """DFlash, and with a rank of the Markov head DSpark, which starts from the DFlash drafter."""

    markov_rank: int = 0
    body_frozen: bool = False
    block: int = 16
    measured_block: int = 0  # where not 0, the block with which tokens a round are measured
    layers: int = 2
    target_layer_ids: tuple[int, ...] = (1, 3, 4)
    seconds: float = 1500.0
    steps: int = 0  # the length where seconds is 0
    adam_rate: float = 2e-3
    muon_rate: float = 0.01
    weight_decay: float = 0.05
    warmup_steps: int = 30
    plateau: float = 0.35
    sequences_per_micro: int = 3
    anchors: int = 16
    micro_batches: int = 4
    position_decay: float = 7.0
    checkpoint_s: float = 300.0
    seed: int = 0


@dataclass(frozen=True)
class Eagle3Settings(DrafterSettings):
    """EAGLE-3; a block is its steps in training and the token that they start from."""

    inner: int = 128  # small, so that this drafter and DSpark's have less than 3 MB together
    own_head: bool = False  # one trained from the target's on; else the target's is used
    block: int = 6
    measured_block: int = 16
    layers: int = 1
    seconds: float = 2150.0
    anchors: int = 48
    position_decay: float = 4.5  # 0.8 a step, as in the EAGLE-3 paper's code


@dataclass(frozen=True)
class EvaluationSettings:
    budgets: tuple[int, ...] = (8, 16, 32, 64)
    max_new_tokens: int = 320
    temperatures: tuple[float, ...] = (0.0, 1.0)


@dataclass(frozen=True)
class Settings:
    corpus: CorpusSettings = field(default_factory=CorpusSettings)
    target: TargetSettings = field(default_factory=TargetSettings)
    draft_data: DraftDataSettings = field(default_factory=DraftDataSettings)
    drafter: DrafterSettings = field(default_factory=DrafterSettings)
    dspark: DrafterSettings = DrafterSettings(
        markov_rank=16, body_frozen=True, seconds=660.0, adam_rate=4e-3, muon_rate=0.0005
    )
    eagle3: Eagle3Settings = field(default_factory=Eagle3Settings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    workers: int = 2
