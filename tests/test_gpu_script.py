"""The script for a machine with GPUs, run where there is none: that it runs, and that it can fail."""

import pytest
import torch

from tests.gpu import step


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU: python -m tests.gpu.step")
    monkeypatch.setattr("sys.argv", ["step"])
    assert step.main() == 2 and "no GPU here" in capsys.readouterr().out


@pytest.mark.slow
def test_all_of_it_runs_with_tiny_sizes_on_a_cpu(capsys):
    found, failed = step.run(step.Machine(torch.device("cpu"), step.TINY, "float32"))
    assert failed == 0, capsys.readouterr().err[-3000:]
    assert {check.__name__ for check in step.CHECKS} <= found.keys()
    assert all(rate["images_per_second"] > 0 for name in ("images_per_second", "large_queue", "choices") for rate in found[name].values())
    assert found["nccl_as_gloo"].keys() == {"largest difference", "to one rank"}


def test_a_check_that_fails_is_counted_and_the_others_go_on(monkeypatch, capsys):
    def wrong(machine):
        return {"loss": step.near([1.0, 2.0], [1.0, 2.1], 1e-3)}

    monkeypatch.setattr(step, "CHECKS", [wrong, step.a_bad_step_changes_nothing])
    found, failed = step.run(step.Machine(torch.device("cpu"), step.TINY, "float32"))
    assert failed == 1 and "differs by 0.1" in found["wrong"]["failed"] and found["a_bad_step_changes_nothing"] == {"optimizers": 3}
