"""Text as it comes, several tokens at a time: python examples/stream.py [ENGINE_DIR]"""

import sys

from ddtree_trt import LLM, SamplingParams

llm = LLM(sys.argv[1] if len(sys.argv) > 1 else "engines/tiny")
task = "Please write get_number(numbers). The steps are: multiply every item by 4; return the minimum."
chat = [{"role": "user", "content": task}]
for part in llm.stream(chat, SamplingParams(temperature=0.7, top_p=0.9, seed=1, max_tokens=128)):
    print(part.outputs[0].text, end="", flush=True)
print()
