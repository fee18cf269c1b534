"""The pairs in `notebooks/`: what can be checked without executing them."""

import ast
import pathlib

import jupytext
import nbformat
import pytest

FOLDER = pathlib.Path(__file__).parents[1] / "notebooks"
SOURCES = sorted(FOLDER.glob("[0-9]*.py"))
CHOICE = 'os.environ.setdefault("KERAS_BACKEND", "jax")'


def cells_of(notebook):
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def paired(source):
    return nbformat.read(source.with_suffix(".ipynb"), as_version=4)


def test_each_notebook_has_a_source():
    notebooks = sorted(FOLDER.glob("*.ipynb"))
    assert notebooks == [source.with_suffix(".ipynb") for source in SOURCES]


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_pairs_agree(source):
    """If this fails: run `make pair`."""
    assert cells_of(jupytext.read(source)) == cells_of(paired(source))


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_committed_notebooks_have_no_outputs(source):
    code = [c for c in paired(source).cells if c.cell_type == "code"]
    assert code
    assert not any(c.outputs or c.execution_count for c in code)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_the_reader_chooses_the_backend(source):
    """`os.environ[...] = "jax"` would run JAX three times in CI."""
    statements = ast.parse(source.read_text(encoding="utf-8")).body
    lines = [ast.unparse(statement) for statement in statements]
    choosing = [line for line in lines if "KERAS_BACKEND" in line]
    assert choosing == [ast.unparse(ast.parse(CHOICE))]
    assert lines.index(choosing[0]) < lines.index("import keras")
    assert "print('Keras backend:', keras.backend.backend())" in lines
