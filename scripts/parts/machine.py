"""How fast this machine is, and the compute dtype that follows from it."""

import functools
import json
import math
import time
from collections.abc import Callable, Sequence

import torch

import utils

MATRIX = 256  # rows and columns of the products that measure a core


def choose_dtype(args: utils.Flags) -> tuple[str, str]:
    """The compute dtype that --model_dtype means on this machine, and why, for a person.

    auto is bfloat16 on a GPU that has it, and on a CPU whose matrix products are faster in it than in float32; else
    float32. A resumed run keeps the dtype that it began with. A CPU without bfloat16 instructions is 6 to 70 times
    slower in it, a CPU with them 1.5 to 8 times faster: the measurement cannot take one for the other.
    """
    asked = args.model_dtype
    why = "as --model_dtype says"
    flags_before = args.run_dir / "args.json"
    if asked == "auto" and args.resume and flags_before.exists():
        asked = json.loads(flags_before.read_text())["model_dtype"]
        why = "as before --resume"
    if asked in ("float16", "float32"):
        return asked, why
    is_fast, reason = bfloat16_is_fast()
    if asked == "auto":
        return ("bfloat16" if is_fast else "float32"), reason
    if not is_fast:
        why += f"; WARNING: slow, {reason}: --model_dtype auto would take float32"
    return asked, why


def bfloat16_is_fast() -> tuple[bool, str]:
    """Whether this machine is fast in bfloat16, and the reason, for a person."""
    if torch.cuda.is_available():
        is_fast = torch.cuda.is_bf16_supported(including_emulation=False)
        has = "has" if is_fast else "has no"
        return is_fast, f"{torch.cuda.get_device_name()} {has} bfloat16"
    bfloat16, float32 = core_speeds([torch.bfloat16, torch.float32])
    return bfloat16 > float32, f"a core reaches {bfloat16:.0f} GFLOP/s in bfloat16, {float32:.0f} in float32 here"


def core_speeds(dtypes: Sequence[torch.dtype]) -> list[float]:
    """GFLOP/s of a product of two 256 x 256 matrices in each dtype, on one core.

    The dtypes take turns for a tenth of a second. Time is the thread's processor time, which other processes do not
    lengthen; with one thread none waits for another that the system has put aside.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    matrices = [torch.randn(MATRIX, MATRIX, generator=torch.Generator()).to(dtype) for dtype in dtypes]
    best = [math.inf] * len(dtypes)  # seconds
    end = time.thread_time() + 0.1
    while time.thread_time() < end or math.inf in best:
        for i, x in enumerate(matrices):
            start = time.thread_time()
            torch.matmul(x, x)
            best[i] = min(best[i], time.thread_time() - start)
    torch.set_num_threads(threads)
    return [2 * MATRIX**3 / seconds / 1e9 for seconds in best]


def device_speed(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Measured ceilings of a device: operations a second of a square matrix product, bytes a second of a copy."""
    n = 512
    num_bytes = 2**26
    if device.type == "cuda":
        n = 8192
        num_bytes = 2**28

    x = torch.randn(n, n, device=device, generator=torch.Generator(device))
    x = x.to(dtype)
    product_seconds = best_seconds(functools.partial(torch.matmul, x, x))
    block = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    copy_seconds = best_seconds(block.clone)
    flops_per_second = 2 * n**3 / product_seconds
    bytes_per_second = num_bytes / copy_seconds
    return {"flops_per_second": flops_per_second, "bytes_per_second": bytes_per_second, "itemsize": dtype.itemsize}


def best_seconds(work: Callable[[], object]) -> float:
    """Wall seconds of the fastest of four calls."""
    best = math.inf
    for _ in range(4):
        start = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best
