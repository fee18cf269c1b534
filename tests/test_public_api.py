"""What the library shows to the outside: names, pages, registration."""

import ast
import inspect
import pathlib
import re

import keras
import pytest

import keras_transformer
from keras_transformer import training

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "keras_transformer"
ROOMS = sorted(
    path.name
    for path in PACKAGE.iterdir()
    if (path / "__init__.py").exists() and path.name != "_internal"
)
BACKENDS = {"jax", "jaxlib", "tensorflow", "torch"}


def documented_names():
    """The names after `:::` on the API pages, without the package."""
    pages = (ROOT / "docs/api").glob("*.md")
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    return re.findall(r"^::: keras_transformer\.(\S+)$", text, re.MULTILINE)


def public_objects():
    named = {
        n: getattr(keras_transformer, n) for n in keras_transformer.__all__
    }
    del named["training"]
    return named | {n: getattr(training, n) for n in training.__all__}


def imported_modules(path):
    """Top-level names of all modules that a source file imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


def test_api_pages_document_all_public_names_once():
    documented = documented_names()
    flat = [name for name in documented if "." not in name]
    assert sorted([*flat, "training"]) == sorted(keras_transformer.__all__)
    helpers = [n for n in documented if n.startswith("training.")]
    assert sorted(helpers) == sorted(f"training.{n}" for n in training.__all__)


def test_all_names_resolve_and_are_sorted():
    for module in (keras_transformer, training):
        assert list(module.__all__) == sorted(module.__all__)
        assert all(hasattr(module, name) for name in module.__all__)


@pytest.mark.parametrize("room", ROOMS)
def test_each_room_has_tests_and_an_api_page(room):
    assert list((ROOT / "tests" / room).glob("test_*.py"))
    assert (ROOT / "docs/api" / f"{room}.md").exists()


def test_the_configured_classes_are_registered_under_the_package():
    classes = [
        value
        for value in public_objects().values()
        if inspect.isclass(value) and hasattr(value, "get_config")
    ]
    assert len(classes) > 25
    for value in classes:
        registered = keras.saving.get_registered_name(value)
        if value is not keras_transformer.Mask:
            assert registered == f"keras_transformer>{value.__name__}"


def test_public_names_have_docstrings():
    for name, value in public_objects().items():
        assert inspect.getdoc(value), name


def test_only_the_backend_files_import_a_backend():
    backends = PACKAGE / "_internal/backends"
    for path in PACKAGE.rglob("*.py"):
        modules = set(imported_modules(path))
        assert not any(m.startswith("keras.src") for m in modules), path
        if backends not in path.parents:
            assert not {m.split(".")[0] for m in modules} & BACKENDS, path


def test_the_package_is_marked_as_typed():
    assert (PACKAGE / "py.typed").exists()


def test_the_readmes_example_runs():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    names = {}
    exec(example, names)
    assert names["result"].tokens.shape == (2, 43)
