"""Matrix products of float32 on a CPU, by oneDNN.

PyTorch has oneDNN and gives it convolutions, but of float32 products on x86 the BLAS library takes all, in half the speed where it does not
know the CPU (MKL on an AMD EPYC with AVX-512, one core, 32 and 256 rows: 15.6 and 92 ms for the two products of InfoNCE with 65536 keys of 128 dimensions, here 9 and 42).
The operator is PyTorch's own, for compiled models, and no public name; where it is missing, and for all else, this is `F.linear`. Other CPUs
with AVX-512 were not measured; without it both took the same time, and BLAS stays.
"""

import functools

import torch
from torch import Tensor
from torch.nn import functional as F


def product(x: Tensor, weight: Tensor) -> Tensor:
    """M,C and O,C -> M,O: x @ weight.T, in their dtype. No gradient."""
    if x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32 and _has_fast_operator():
        return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return F.linear(x, weight)


@functools.cache
def _has_fast_operator() -> bool:
    return torch.backends.mkldnn.is_available() and "AVX512" in torch.backends.cpu.get_cpu_capability() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
