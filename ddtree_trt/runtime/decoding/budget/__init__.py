"""Tree budgets: how many draft nodes a round verifies, fixed or chosen by what rounds cost and gain.

`auto` is one rule:

- **Size.** Of the pop order take the prefix of n nodes that makes most expected tokens per second (CaDDTree, arXiv
  2606.01813): (N + Σ q̂) / (C_draft + C_verify(N, n)), summed row by row over the N slots of a pass, of which a lone
  request is one (`policy`). q̂ is the drafter's probability, corrected by how often such nodes were accepted
  (`Calibration`). A drafter that drafts by tokens or by levels has no probabilities before it runs: there the length is
  chosen in the same way by how often rounds came to each depth.
- **Costs** are what passes take: a coarse profile, corrected by the time of rounds (`costs`).
- **Draft or not.** Since it last gained a request may lose LOSS + PROBE · √tokens, in single-token passes. It drafts
  where gain is expected and that affords a round of which nothing is accepted, the context that the drafter takes in
  first counted; where none is, PROBE · √tokens alone pays for probes, at growing gaps. So a useless drafter costs that
  much and no more. In a shared pass a request is charged with what its draft adds to the time of all slots, so that
  each waits for what all lose on average. Requests share costs alone: none can end another's drafting.
"""
