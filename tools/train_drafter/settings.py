"""Every default of the recipe, in one place; the command line reads them from here."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class DataSettings:
    """The target's own answers on which the drafter learns."""

    batch: int = 96  # answers written at once
    pool: int = 4  # batches of one file, of prompts sorted by length together
    self_written: float = 0.5  # share of prompts that the target writes itself
    self_tokens: int = 80  # a prompt of its own that has not ended by then is dropped
    temperatures: tuple[tuple[float, float], ...] = ((0.0, 0.65), (0.7, 0.25), (1.0, 0.10))  # temperature, share
    max_new: int = 160
    chats: float = 0.3  # share of conversations of more than one answer
    most_turns: int = 12
    max_prompt: int = 1888  # of an answer, earlier ones included: a conversation ends there
    top_k: int = 50  # tokens that sampling chooses from
    seed: int = 1


@dataclass(frozen=True)
class Schedule:
    """Rates are the peak: warm-up, plateau, straight line to zero over the last part."""

    adam_rate: float = 6e-4
    muon_rate: float = 0.003
    weight_decay: float = 0.2
    warmup: int = 15  # steps
    decay: float = 0.3  # the last part
    steps: int = 6000
    seconds: float = 0.0  # where not 0, the length by the clock in place of `steps`
    micro_batches: int = 3  # of one step
    average: float = 0.99  # of the weights that are measured and exported
    check_s: float = 600.0
    save_s: float = 240.0


@dataclass(frozen=True)
class DrafterSettings:
    """Shape and training of the drafter."""

    kind: str = "dflash"  # dflash, dspark, eagle3
    block: int = 6  # the bonus token and the drafts after it; of EAGLE-3 the steps of a chain
    short_block: int = 3  # of all micro-batches of a step but the first: twice the first drafts for the same time
    layers: int = 3
    window: int = 0  # positions that a DFlash drafter's row sees, itself counted; 0: all
    inner: int = 0  # of the feed-forward network; 0: as the target's
    taps: int | tuple[int, ...] = 4  # target layers read, or how many, from the second to the third from last
    markov_rank: int = 32  # of DSpark's head
    frozen: bool = False  # all but DSpark's head, which then has tables of its own
    tap_dropout: float = 0.1  # of the tapped channels, the same ones all through an answer
    sequences: int = 8  # of one micro-batch,
    tokens: int = 4096  # or fewer that have no more than so many tokens
    anchors: int = 16  # whole blocks a sequence, of fewer more; of short ones as many as have as many positions
    position_decay: float = 2.5
    label_share: float = 0.5  # of greedy text's loss: the token itself; the rest is the target's distribution
    dtype: str = "bfloat16"  # of the exported folder
    seed: int = 0
    schedule: Schedule = field(default_factory=Schedule)


@dataclass(frozen=True)
class ValidationSettings:
    """Held-out prompts answered greedily; `prompts` of them measure during training, others are kept for the end."""

    prompts: int = 30
    max_new: int = 96
    budget: int = 16
    seed: int = 2
    final_prompts: int = 60
    final_max_new: int = 128
    final_seed: int = 3
    final_budgets: tuple[int, ...] = (8, 16, 32, 64)
    long: int = 1000  # tokens from which a chat counts as long


@dataclass(frozen=True)
class Settings:
    data: DataSettings = field(default_factory=DataSettings)
    drafter: DrafterSettings = field(default_factory=DrafterSettings)
    validation: ValidationSettings = field(default_factory=ValidationSettings)


DEFAULTS = Settings()
GPU: dict[str, float] = {"sequences": 32, "tokens": 16384, "writers": 3, "batch": 384, "minutes": 20}
CPU: dict[str, float] = {"sequences": DEFAULTS.drafter.sequences, "tokens": DEFAULTS.drafter.tokens, "writers": 1}
CPU |= {"batch": DEFAULTS.data.batch, "minutes": 480}
