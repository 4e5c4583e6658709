"""Product: a tile of logits, token by row, in float32: rows of the unembedding times states.

N tokens of a tile, L lanes (states side by side), D width. Two ways to the same numbers: oneDNN's micro-kernels as
torch carries them, which take bfloat16 operands and keep float32 results, and torch's own product of float32
operands. The first is used where the machine has it, and only after it has multiplied rightly.
"""

import ctypes
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

Way = Literal["oneDNN bfloat16", "oneDNN float32", "torch float32"]

_NAMES = {torch.float32: "PKfS3_Pfb", torch.bfloat16: "PKN3c108BFloat16ES5_Pfb"}
"""Ends of the names that torch exports its micro-kernel by, as for the code that its own compiler writes."""


@dataclass(frozen=True, slots=True)
class Product:
    """How tiles of one head are computed."""

    way: Way

    def lay_out(self, state_LD: Tensor) -> Tensor:
        """Lay states out as the right-hand side of many products."""
        if self.way == "oneDNN bfloat16":
            lanes, width = state_LD.shape
            return state_LD.view(lanes, width // 2, 2).transpose(0, 1).contiguous()  # pairs, as its instruction reads
        return state_LD.to(torch.float32).T.contiguous()

    def weights(self, weight_ND: Tensor) -> Tensor:
        """Bring a tile of the unembedding to the dtype that is multiplied."""
        return weight_ND if self.way == "oneDNN bfloat16" else weight_ND.to(torch.float32)

    def into(self, out_NL: Tensor, weight_ND: Tensor, laid_out: Tensor) -> None:
        """Multiply; `weight_ND` is of `weights`, `laid_out` of `lay_out`, and out_NL contiguous."""
        if self.way == "torch float32":
            torch.mm(weight_ND, laid_out, out=out_NL)
            return
        tokens, width = weight_ND.shape
        lanes = out_NL.shape[1]
        low = self.way == "oneDNN bfloat16"
        operands = weight_ND.data_ptr(), laid_out.data_ptr(), out_NL.data_ptr()
        _micro_kernel(weight_ND.dtype)(tokens, lanes, width, width, lanes, lanes, False, *operands, low)

    @property
    def address(self) -> int:
        """Of the micro-kernel, for compiled code; 0 where torch multiplies."""
        if self.way == "torch float32":
            return 0
        found = _micro_kernel(torch.bfloat16 if self.way == "oneDNN bfloat16" else torch.float32)
        return ctypes.cast(found, ctypes.c_void_p).value or 0  # type: ignore[arg-type]

    def release(self) -> None:
        """Give back what the calling thread's processor core holds for these products (AMX tiles)."""
        if self.way != "torch float32":
            _library()[f"{_PREFIX}14brgemm_releaseEb"](self.way == "oneDNN bfloat16")


def choose_product(weight: torch.dtype, state: torch.dtype, width: int) -> Product:
    """Choose how to multiply: the fastest way that loses nothing of these operands.

    bfloat16 products of bfloat16 operands are exact in float32, so they differ from float32 products only in the
    order of the sum.
    """
    if weight == state == torch.bfloat16 and width % 2 == 0 and _is_right("oneDNN bfloat16"):
        return Product("oneDNN bfloat16")
    return Product("oneDNN float32" if _is_right("oneDNN float32") else "torch float32")


_PREFIX = "_ZN2at6native7cpublas"


@cache
def _library() -> Any:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libtorch_cpu.so"))


@cache
def _micro_kernel(dtype: torch.dtype) -> Callable[..., None]:
    found: Callable[..., None] = _library()[f"{_PREFIX}6brgemmEllllllb{_NAMES[dtype]}"]
    found.argtypes = [ctypes.c_int64] * 6 + [ctypes.c_bool] + [ctypes.c_void_p] * 3 + [ctypes.c_bool]  # type: ignore[attr-defined]
    found.restype = None  # type: ignore[attr-defined]
    return found


def _is_right(way: Way) -> bool:
    return bool(torch.backends.mkldnn.enabled) and _multiplies_rightly(way)


@cache
def _multiplies_rightly(way: Way) -> bool:
    """Tell whether the processor and this torch have the micro-kernel, and it multiplies as float64 does."""
    # Where the processor lacks the instructions the kernel would end the process: so that is asked first.
    limited = {"ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"} & os.environ.keys()
    if platform.system() != "Linux" or torch.backends.cpu.get_cpu_capability() != "AVX512" or limited:
        return False
    low = way == "oneDNN bfloat16"
    if low and "avx512_bf16" not in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="ignore"):
        return False
    try:
        _micro_kernel(torch.bfloat16 if low else torch.float32)
        _library()[f"{_PREFIX}14brgemm_releaseEb"].argtypes = [ctypes.c_bool]
    except (OSError, AttributeError):
        return False
    product, draw = Product(way), torch.Generator().manual_seed(0)
    for tokens, lanes, width in ((40, 33, 70), (256, 128, 576)):
        dtype = torch.bfloat16 if low else torch.float32
        weight, state = (torch.randn(n, width, generator=draw).to(dtype) for n in (tokens, lanes))
        found = torch.empty(tokens, lanes)
        product.into(found, weight, product.lay_out(state))
        product.release()
        if not torch.allclose(found.double(), weight.double() @ state.double().T, rtol=1e-5, atol=1e-4):
            return False
    return True
