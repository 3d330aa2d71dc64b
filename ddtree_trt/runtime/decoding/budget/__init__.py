"""Tree budgets: how many draft nodes a round verifies, fixed or chosen by what rounds cost and gain.

`auto` is one rule:

- **Size.** Of the pop order take the prefix of n nodes that makes most expected tokens per second (CaDDTree, arXiv
  2606.01813): (N + Σ q̂) / (C_draft + C_verify(N, n)), summed row by row over the N slots of a pass, of which a lone
  request is one (`policy`). q̂ is the drafter's probability, corrected by how often such nodes were accepted. A drafter
  that drafts by tokens or by levels has no probabilities before it runs: there the length is chosen in the same way by
  how often rounds came to each depth.
- **Costs** are what passes take: a coarse profile, corrected by the time of rounds (`costs`).
- **Draft or not.** A request drafts where gain is expected, while what it has lost by drafting since it last gained,
  and a round of which nothing is accepted, are at most LOSS single-token passes. A new request expects of its drafts
  what the ones before it came to expect. Where none gains, one probes now and then: all probes of an engine may lose
  PROBES of its tokens, and a probe that gains lets its request draft again. So a useless drafter costs that much and
  no more, and no request ends another's drafting. What a drafter has still to take in, such as a long prompt, must
  be repaid by what its drafts are expected to save.
"""
