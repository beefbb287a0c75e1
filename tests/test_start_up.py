"""What a command waits for before it does anything. By what is imported, not by time: a busy machine is no failure."""

import subprocess
import sys

import pytest

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
