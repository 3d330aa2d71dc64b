"""Tree budgets: how many draft nodes a round verifies, fixed or chosen by what rounds cost and gain.

`auto` is one rule:

- **Size.** Of the pop order take the prefix of n nodes that makes most expected tokens per second (CaDDTree, arXiv
  2606.01813): (N + Σ q̂) / (C_draft + C_verify(N, n)), summed row by row over the N slots of a pass, of which a lone
  request is one (`policy`). q̂ is the drafter's probability, corrected by how often such nodes were accepted
  (`Calibration`). A drafter that drafts by tokens or by levels has no probabilities before it runs: there the length is
  chosen in the same way by how often rounds came to each depth.
- **Costs** are what passes take: a coarse profile, corrected by the time of rounds (`costs`).
- **Draft or not.** Since it last gained a request may lose LOSS + PROBE · √tokens single-token passes. It drafts where
  gain is expected and that affords a round of which nothing is accepted; where none is, PROBE · √tokens alone pays for
  probes, at growing gaps. So a useless drafter costs that much and no more. Every request makes its own first drafts;
  requests share costs, and may lose less behind it when PATIENCE of them in a row have lost. What a drafter has still
  to take in, such as a long prompt, must take less than a pass for every REPAID tokens that are left.
"""
