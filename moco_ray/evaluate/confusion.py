"""A picture of which classes are taken for which. Not responsible for counting (linear.py)."""

import io
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

NAMED = 40  # classes: more have no room for their names
WRITTEN = 15  # classes: more have no room for the numbers


def confusion_picture(confusion: Sequence[Sequence[int]], classes: Sequence[str], title: str) -> bytes:
    """PNG of counts [true][predicted], each row as shares of its class. `classes` may be empty: then they are numbers."""
    counts = np.asarray(confusion, np.float64)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    number = len(counts)
    side = 7.5 if number > 5 else 5.0
    figure = Figure(figsize=(side + 1.0, side), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(shares, cmap="Blues", vmin=0.0, vmax=1.0)
    figure.colorbar(image, label="share of the true class", shrink=0.8)
    axes.set(title=title, xlabel="predicted class", ylabel="true class")
    if number <= NAMED:
        names = [str(n) for n in (classes if len(classes) == number else range(number))]
        axes.set_xticks(range(number), names, rotation=90 if max(map(len, names)) > 2 else 0)
        axes.set_yticks(range(number), names)
    if number <= WRITTEN:
        for true, predicted in np.ndindex(number, number):
            share = shares[true, predicted]
            if share >= 0.005:
                colour = "white" if share > 0.5 else "black"
                axes.text(predicted, true, f"{100 * share:.0f}", ha="center", va="center", color=colour, fontsize=8)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
