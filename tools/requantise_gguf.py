"""Write a GGUF file anew in another type with llama.cpp's quantizer, for `ddtree-trt bench --peer llama-cpp=…`.

    python tools/requantise_gguf.py SmolLM2-135M-Instruct.Q4_1.gguf Q8_0 SmolLM2-135M-Instruct.Q8_0.gguf

Every tensor is dequantised and quantised again, so the values are those of the file that is read, up to the rounding of
the new type: F32 keeps them exactly. Needs llama-cpp-python, the extra [peers].
"""

from __future__ import annotations

import argparse
import ctypes
import os
from pathlib import Path

import llama_cpp

_PREFIXES = ("LLAMA_FTYPE_ALL_", "LLAMA_FTYPE_MOSTLY_")


def types() -> dict[str, int]:
    """llama.cpp's numbers of file types by name, such as Q8_0."""
    names = [(name, prefix) for name in dir(llama_cpp) for prefix in _PREFIXES if name.startswith(prefix)]
    return {name.removeprefix(prefix): getattr(llama_cpp, name) for name, prefix in names}


def requantise(source: Path, kind: str, output: Path) -> None:
    """Write `output`, whole or not at all. Raises SystemExit where llama.cpp refuses."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize, params.pure = types()[kind], True, True
    partial = output.with_suffix(".partial")
    failed = llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(partial), ctypes.byref(params))
    if failed:
        partial.unlink(missing_ok=True)
        raise SystemExit(f"llama.cpp cannot write {source} as {kind}; is it a whole GGUF file?")
    os.replace(partial, output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("type", choices=sorted(types()))
    parser.add_argument("output", type=Path)
    args = parser.parse_args()
    if not args.source.is_file():
        raise SystemExit(f"{args.source} is no file")
    requantise(args.source, args.type, args.output)


if __name__ == "__main__":
    main()
