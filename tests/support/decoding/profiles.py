"""Latency profiles made by a formula."""

from ddtree_trt.drafters.kind import Drafts
from ddtree_trt.runtime.decoding.budget.costs import Costs
from ddtree_trt.runtime.decoding.budget.policy import AutoBudgets
from ddtree_trt.runtime.engines.profile import PassTimes, Profile

SIZES = (1, 2, 3, 5, 9, 17, 33, 65)


def pass_times(draft_s: float, slope: float, slots: int = 1, context: int = 64, first: float = 0.0) -> PassTimes:
    """A single token of a slot takes 1 second, a tree of T > 1 tokens `first` + `slope` · (T − 1) seconds more."""
    verify = tuple((t, slots * (1 + (first + slope * (t - 1) if t > 1 else 0))) for t in SIZES)
    return PassTimes(slots, context, draft_s, verify)


def make_profile(draft_s: float = 0.5, slope: float = 0.05, first: float = 0.0) -> Profile:
    """Passes behind 1,024 tokens take half as long again."""
    near = pass_times(draft_s, slope, first=first)
    far = PassTimes(1, 1024, draft_s, tuple((t, 1.5 * s) for t, s in near.verify))
    return Profile("fingerprint", near, far)


def make_budgets(profile: Profile, nodes: int = 64, depth: int = 15, proposes: Drafts = "block") -> AutoBudgets:
    return AutoBudgets(Costs(profile, nodes), nodes, depth, proposes)


CPU = make_profile(draft_s=1.0, slope=0.08, first=0.22)  # about what the packaged pair costs
SLOW_CPU = make_profile(draft_s=1.5, slope=0.12, first=0.28)
GPU = make_profile(draft_s=0.22, slope=0.004, first=0.016)
CHAINS = {"small": make_profile(0.17, 0.05, 0.05), "half": make_profile(0.45, 0.005, 0.015)}  # drafted by tokens
