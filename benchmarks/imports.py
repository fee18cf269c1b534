"""What `import keras_transformer` adds to `import keras`.

    KERAS_BACKEND=jax python benchmarks/imports.py [--quick]

Each import is made in a fresh process, in turns; the files are in the cache
of the system after the first round, which is not counted. "added" is the time
of the import of the library in a process that has imported Keras.
"""

import os
import subprocess
import sys

import numpy as np
from timing import Table, alternated, options

COLUMNS = {"backend": 10, "import": 20, "process s": 9, "added s": 7}
MODULES = ("keras", "keras_transformer", "keras_hub")
CODE = """
import time
import keras
start = time.perf_counter()
import {module}
print(time.perf_counter() - start)
"""


def importer(module, added):
    """A function that imports the module in a fresh process."""

    def run():
        process = subprocess.run(
            [sys.executable, "-c", CODE.format(module=module)],
            check=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        added.append(float(process.stdout.split()[-1]))

    return run


def main(chosen):
    """Prints the table."""
    table = Table(**COLUMNS)
    added = {module: [] for module in MODULES if chosen.wants(module)}
    functions = {name: importer(name, added[name]) for name in added}
    times = alternated(functions, chosen.repeats)
    for module, values in times.items():
        cells = {}
        if module != "keras":
            cells["added s"] = f"{np.median(added[module][1:]):.3f}"
        table.add(
            **{
                "backend": os.environ.get("KERAS_BACKEND", "tensorflow"),
                "import": module,
                "process s": f"{np.median(values):.2f}",
                **cells,
            }
        )


if __name__ == "__main__":
    main(options(__doc__, repeats=11))
