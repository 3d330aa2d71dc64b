"""Print where this interpreter's torch is and the CUDA version it was built for, `none` for a CPU build: `FOLDER;CUDA`.

torch is not imported. Without a torch the exit status is 1.
"""

import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

found = find_spec("torch")
if found is None or found.origin is None:
    sys.exit(1)
folder = Path(found.origin).parent
print(folder, runpy.run_path(str(folder / "version.py"))["cuda"] or "none", sep=";", end="")
