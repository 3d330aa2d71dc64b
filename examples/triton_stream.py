"""A gRPC stream of the model `tiny` on a Triton server: python examples/triton_stream.py [localhost:8001]"""

import queue
import sys

import numpy as np
import tritonclient.grpc as grpcclient


def tensor(name, value, datatype):
    array = np.array([[value]], dtype=object if datatype == "BYTES" else None)
    array = array if datatype == "BYTES" else array.astype({"INT32": np.int32, "BOOL": bool}[datatype])
    made = grpcclient.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


address = sys.argv[1] if len(sys.argv) > 1 else "localhost:8001"
question = "There are 6 drawers, each with 32 cards. How many cards are there?"
prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
inputs = [
    tensor("text_input", prompt.encode(), "BYTES"),
    tensor("max_tokens", 64, "INT32"),
    tensor("stream", True, "BOOL"),
]
answers = queue.Queue()
with grpcclient.InferenceServerClient(address) as client:
    client.start_stream(lambda result, error: answers.put((result, error)))
    client.async_stream_infer("tiny", inputs, enable_empty_final_response=True)
    final = False
    while not final:
        result, error = answers.get()
        if error is not None:
            raise error
        final = result.get_response().parameters["triton_final_response"].bool_param
        print(result.as_numpy("text_output")[0].decode(), end="", flush=True)
    print(f"\nacceptance rate {result.as_numpy('acceptance_rate').item():.2f}")
