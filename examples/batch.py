"""Many prompts at once, each with parameters of its own: python examples/batch.py [ENGINE_DIR]"""

import sys

from ddtree_trt import LLM, SamplingParams

questions = {
    "There are 6 drawers, each with 32 cards. How many cards are there?": SamplingParams(max_tokens=64),
    "There are 8 trays on the table, each with 41 plates. What is the total number of plates?": SamplingParams(
        max_tokens=64, tree_budget=8
    ),
}
llm = LLM(sys.argv[1] if len(sys.argv) > 1 else "engines/tiny")
prompts = [[{"role": "user", "content": question}] for question in questions]
for output in llm.generate(prompts, list(questions.values())):
    answer, metrics = output.outputs[0], output.metrics
    print(answer.text.splitlines()[-1])
    print(f"{len(answer.token_ids)} tokens, {metrics.mean_acceptance_length:.1f} a round")
