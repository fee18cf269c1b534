"""Executes a notebook and shows its output in the terminal as it comes.

Usage: python scripts/run_notebook.py notebooks/01_quickstart.ipynb OUTPUT

The executed notebook and its figures are written to the folder OUTPUT.
"""

import argparse
import base64
import pathlib
import sys

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError


class Narrator(NotebookClient):
    """A notebook client that prints what the cells print."""

    figures = ()

    def output(self, outs, msg, display_id, cell_index):
        """Shows one message of the kernel, and files it as nbclient does."""
        content = msg["content"]
        data = content.get("data", {})
        if msg["msg_type"] == "stream":
            print(content["text"], end="", flush=True)
        elif "image/png" in data:
            self.figures = (*self.figures, base64.b64decode(data["image/png"]))
            print(f"[figure {len(self.figures)}]", flush=True)
        elif "text/plain" in data:
            print(data["text/plain"], flush=True)
        return super().output(outs, msg, display_id, cell_index)


def announce(cell, cell_index):
    """Prints the heading of a text cell."""
    lines = cell.source.splitlines()
    if cell.cell_type == "markdown" and lines and lines[0].startswith("#"):
        print(f"\n{lines[0]}", flush=True)


def main():
    """Runs the notebook named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("notebook", type=pathlib.Path)
    parser.add_argument("output", type=pathlib.Path)
    arguments = parser.parse_args()

    notebook = nbformat.read(arguments.notebook, as_version=4)
    client = Narrator(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(arguments.notebook.parent)}},
        on_cell_start=announce,
    )
    arguments.output.mkdir(parents=True, exist_ok=True)
    executed = arguments.output / arguments.notebook.name
    try:
        client.execute()
    except CellExecutionError as error:
        sys.exit(str(error))
    finally:
        nbformat.write(notebook, executed)
    for number, figure in enumerate(client.figures, start=1):
        path = executed.with_suffix(f".{number}.png")
        path.write_bytes(figure)
        print(f"figure {number}: {path}")
    print(f"executed notebook: {executed}")


if __name__ == "__main__":
    main()
