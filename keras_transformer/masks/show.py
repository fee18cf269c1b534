"""Pictures of masks, in text or with matplotlib."""

import numpy as np


def panels(allowed):
    """The pictures in a dense mask: pairs of a title and a matrix.

    Args:
        allowed: `(query, key)`, `(heads, query, key)` or `(batch, heads,
            query, key)`.
    """
    axes = ("batch row", "head")[4 - allowed.ndim :]
    for place in np.ndindex(allowed.shape[:-2]):
        title = ", ".join(
            f"{axis} {index}"
            for axis, index, size in zip(
                axes, place, allowed.shape[:-2], strict=True
            )
            if size > 1
        )
        yield title, allowed[place]


def as_text(allowed) -> str:
    """One character a pair, `#` where allowed; a row for each query."""
    pictures = []
    for title, matrix in panels(allowed):
        lines = ["".join(row) for row in np.where(matrix, "#", ".")]
        pictures.append("\n".join([f"{title}:"] * bool(title) + lines))
    return "\n\n".join(pictures)


def as_figure(allowed, title: str):
    """A matplotlib figure with one panel for each batch row and head."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "`show(picture=True)` needs matplotlib. Install it with "
            "`pip install keras-transformer-layers[plots]`, or leave "
            "`picture` out for a picture in text."
        ) from error
    pictures = list(panels(allowed))
    columns = min(len(pictures), 4)
    rows = -(-len(pictures) // columns)
    figure = Figure(figsize=(3 * columns, 3 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(pictures) :]:
        axes.set_axis_off()
    for axes, (name, matrix) in zip(grid.flat, pictures, strict=False):
        axes.imshow(matrix, cmap="Blues", vmin=0, vmax=1.5, aspect="auto")
        axes.set(title=name, xlabel="key slot", ylabel="query slot")
    figure.suptitle(title)
    return figure
