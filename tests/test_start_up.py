"""What a command waits for before it does anything. By what is imported, not by time: a busy machine is no failure."""

import subprocess
import sys
import threading

import pytest

from moco_ray.data.begun import Begun
from moco_ray.errors import UserError

HEAVY = ("torch", "torchvision", "ray", "pyarrow", "pydantic", "numpy", "fsspec", "PIL", "matplotlib", "tensorboard")
ASK = """
import sys
from moco_ray.cli import main
try:
    main(sys.argv[1:])
except SystemExit as ended:
    assert not ended.code
print("imported", *sys.modules, file=sys.stderr)
"""


def heavy_imports(*words: str) -> set[str]:
    """The packages of HEAVY that a process has imported once a command has printed its help."""
    done = subprocess.run([sys.executable, "-c", ASK, *words], capture_output=True, text=True, check=True)
    assert "usage: moco-ray" in done.stdout
    first, *modules = done.stderr.split()
    assert first == "imported"
    return {module.split(".")[0] for module in modules} & set(HEAVY)


@pytest.mark.parametrize("words", [("--help",), ("pretrain", "--help")])
def test_help_is_printed_before_anything_heavy_is_imported(words):
    assert heavy_imports(*words) == set()


def test_the_driver_imports_no_torchvision_before_ray_is_started():
    """With torch._dynamo it takes a second, and only the workers need it."""
    ask = "import sys, moco_ray.launch; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    assert {"torch", "ray"} <= set(done.stdout.split())
    assert {"torchvision", "torch._dynamo", "sympy"} & set(done.stdout.split()) == set()


def test_the_first_item_is_made_before_it_is_asked_for_and_the_others_when_they_are():
    made, begun = [], threading.Event()

    def items():
        for number in range(3):
            made.append(number)
            begun.set()
            yield number

    rows = Begun(items())
    assert begun.wait(10) and made == [0]
    assert [next(rows), next(rows)] == [0, 1] and made == [0, 1]
    assert list(rows) == [2]


@pytest.mark.parametrize("error", [UserError("no such image"), StopIteration()])
def test_what_the_first_item_raises_is_raised_where_it_is_asked_for(error):
    class Failing:
        def __next__(self):
            raise error

    rows = Begun(Failing())
    with pytest.raises(type(error)):
        next(rows)
