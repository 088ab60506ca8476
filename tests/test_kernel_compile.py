"""The decode kernels compile for Hopper, without a GPU: the interpreter accepts what the compiler does not."""

import os
import subprocess
import sys

import pytest

FLOATS = ("scale", "softcap", "second_order", "spread_limit")
POINTERS = {
    "score": "*fp32", "logit": "*fp32", "lse": "*fp32", "out": "*fp32", "piece": "*fp32", "sink": "*fp32",
    "centroid_scale": "*fp32", "variance_scale": "*fp32", "mean_scale": "*fp32",
    "centroid": "*i8", "variance": "*i8", "mean": "*i8", "chosen": "*u8", "missed": "*u8", "counter": "*i64",
    "list": "*i64",
}  # fmt: skip
SHAPE = {
    "GROUP": 4, "GROUP_PADDED": 16, "HEAD_DIM": 128, "DIM_PADDED": 128, "KEY_DIM": 128, "KEY_PADDED": 128,
    "VALUE_DIM": 128, "VALUE_PADDED": 128, "BLOCK_SIZE": 8, "BLOCK_SIZE_PADDED": 8, "WORDS": 64, "WORDS_PADDED": 64,
    "MAX_BLOCKS_PADDED": 512, "SLOTS_PADDED": 1024, "LIMIT": 512, "TILE": 64, "CLUSTER_TILE": 64, "BLOCKS": 4,
    "DIMS": 32, "POLICY": 2, "AGING_PERIOD": 64, "FREQUENCY_BONUS": 4, "MAX_USES": 255,
    "HAS_SOFTCAP": True, "HAS_VARIANCE": True, "IN_DIGITS": True, "HAS_ATTENDED": True, "HAS_ESTIMATED": True,
    "NUM_STAGES": 3, "HAS_SINK": True, "HAS_COUNTERS": True, "HAS_HINTS": True,
    "CHUNKS": 8, "COLUMNS": 1024, "HAS_REST": True, "PIECES": 1, "PIECES_PADDED": 1,
}  # fmt: skip


def test_kernels_compile_for_hopper():
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def compile_all():
    from tiered_kv.kernels import attend, lookup, recall, score, select

    compile_kernel(score.score_kernel, {"query": "*bf16"})
    compile_kernel(score.score_kernel, {"query": "*bf16", "centroid": "*bf16", "variance": "*bf16"}, IN_DIGITS=False)
    compile_kernel(score.score_kernel, {"query": "*fp32"}, TILE=16, IN_DIGITS=False)
    compile_kernel(attend.attend_kernel, {"query": "*bf16", "recent": "*bf16", "cache": "*bf16"})
    compile_kernel(attend.merge_kernel, {"out": "*bf16"}, PIECES_PADDED=64)
    compile_kernel(recall.recall_kernel, {"cache": "*i64", "host_address": "i64"})
    compile_kernel(select.narrow_kernel, {})
    compile_kernel(select.select_kernel, {})
    compile_kernel(lookup.assign_kernel, {})
    compile_kernel(lookup.select_and_assign_kernel, {})
    compile_kernel(lookup.select_and_assign_kernel, {}, HAS_REST=False, PIECES=16, PIECES_PADDED=16)


def compile_kernel(kernel, types, **constants):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {**SHAPE, **constants}
    signature, values = {}, {}
    for place, parameter in enumerate(kernel.params):
        if parameter.is_constexpr:
            signature[parameter.name], values[(place,)] = "constexpr", constants[parameter.name]
        else:
            signature[parameter.name] = type_of(parameter.name, types)
    triton.compile(ASTSource(kernel, signature, values), target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})


def type_of(name, types):
    stem = name.removesuffix("_ptr")
    if stem in types:
        return types[stem]
    if name.endswith("_ptr"):
        return POINTERS.get(stem, "*i32")
    return "fp32" if name in FLOATS else "i32"


if __name__ == "__main__":
    compile_all()
