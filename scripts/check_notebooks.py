"""Checks executed notebooks: the backend asked for is the one that ran.

Usage: python scripts/check_notebooks.py FOLDER BACKEND

A notebook that fixes its backend would otherwise pass on every backend while
running on one.
"""

import pathlib
import sys

import nbformat


def printed(path):
    """All that the cells of an executed notebook printed."""
    cells = nbformat.read(path, as_version=4).cells
    outputs = [o for cell in cells for o in cell.get("outputs", [])]
    return "".join(output.get("text", "") for output in outputs)


def main(folder, backend):
    """Exits with an error unless each notebook names the backend."""
    paths = sorted(pathlib.Path(folder).glob("*.ipynb"))
    line = f"Keras backend: {backend}\n"
    wrong = [path.name for path in paths if line not in printed(path)]
    if wrong or not paths:
        sys.exit(f"These notebooks did not print {line.strip()!r}: {wrong}")
    print(f"{len(paths)} notebooks ran on {backend}")


if __name__ == "__main__":
    main(*sys.argv[1:])
