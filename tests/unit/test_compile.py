"""Every variant compiles for sm_90 and sm_100 under the newest Triton and for sm_90 under the oldest, without a GPU.

A sample of the corners is compiled; `TUNEDCOMM_TEST_FULL=1` compiles them all under both.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import compile_corners
import pytest
from programs import python
from quick import FULL, QUICK

from tunedcomm import kernels
from tunedcomm.spec import ops, variants

ROOT = Path(__file__).parents[2]
OLDEST = ROOT / ".venv-oldest-triton"
# Read here: fixtures keep TUNEDCOMM_* away from the tests.
OLDEST_IS_A_MUST = os.environ.get("TUNEDCOMM_REQUIRE_OLDEST_TRITON") == "1"

# Bytes of stack a thread, which is what spilled registers take. Measured: 8 at most, and 24 for two_shot_split at 8
# ranks under the oldest Triton.
MAX_STACK_BYTES = 24
# Of kernels that ask for more: at 3 ranks, where the shares of a row are no powers of two, 56 under the newest Triton.
# Those that sort tokens keep an address of each of 8 rows and 8 peers: at 3 ranks, 48. One that merges 8 ranks' packets
# keeps them all: 48 for sm_100. One that keeps 4 quantised packets a thread of 16 warps, 56 under the oldest Triton.
# One that compares 256 ids with each other, 40 under the oldest; and one that sums 8 rows before it quantises, 48.
MAX_STACK_BYTES_OF = {
    **dict.fromkeys(("dispatch_kernel", "dispatch_lamport_kernel", "combine_lamport_kernel"), 64),
    "rms_norm_two_shot_kernel": 64,
    "push_merge_kernel": 64,
    "lamport_quantized_kernel": 64,
    "count_kernel": 64,
    "combine_tokens_quantized_kernel": 64,
    "dispatch_kernel NUMBERED": 256,  # 192 at 4 ranks
    "dispatch_tokens_push_kernel NUMBERED": 256,  # the threads of 16 warps, which have 128 registers, at 8 ranks: 216
    "dispatch_tokens_direct_kernel NUMBERED": 256,  # the same: 32; those of 32 warps, which have 64: 240
    "combine_tokens_pull_kernel NUMBERED": 160,  # those of 32 warps: 144
}
# Where a tail of single elements is read and written by 512 threads, which have at most 128 registers each. Measured at
# 8 ranks: two_shot 552, one_shot 1264.
MAX_STACK_BYTES_TAIL = 1280
# Of products of matrices: their tiles are chosen for sm_90; on sm_100 some spill.
MAX_STACK_BYTES_PRODUCT = {90: 64, 100: 512}
SHARED_OF_SM = 228 * 1024
NUM_SMS = 132


def paths_of(version: str) -> list[Path]:
    """What comes before all else on the path under that version of Triton."""
    if version == "oldest" and not (OLDEST / "triton").is_dir():
        reason = f"no {OLDEST.name}/triton; `make oldest-triton` installs the oldest supported Triton there"
        assert not OLDEST_IS_A_MUST, reason
        pytest.skip(reason)
    return [OLDEST] if version == "oldest" else []


def run_corners(version: str, cache: Path, *arguments: str) -> list[dict[str, Any]]:
    """What `compile_corners.py` prints under that version of Triton."""
    variables = {"PYTHONHASHSEED": "77", "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    variables |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = python(compile_corners.__file__, *arguments, paths=paths_of(version), timeout=3600, **variables)
    return [json.loads(line) for line in done.stdout.splitlines()]


def complaints(binary: dict[str, Any]) -> list[str]:
    """What is wrong with a binary."""
    if "failed" in binary:
        return [f"does not compile: {binary['failed']}"]
    if "BLOCK_M" in binary:  # a product of matrices, which sums as the hardware does
        return [*about_resources(binary), *about_products(binary)]
    return [*about_resources(binary), *about_accesses(binary), *about_arithmetic(binary), *about_multimem(binary)]


def about_products(binary: dict[str, Any]) -> list[str]:
    """Products by the tensor cores, multimem instructions in variants of that name alone."""
    opcodes, found = binary["instructions"], []
    if not any(opcode.startswith(("wgmma.mma_async", "tcgen05.mma", "mma.sync")) for opcode in opcodes):
        found.append(f"multiplies without tensor cores: {sorted(opcodes)}")
    if any(opcode.startswith("multimem.") for opcode in opcodes) != (binary["variant"] == "multimem"):
        found.append("has multimem instructions, or has none, against its name")
    return found


def moves_whole_packets(binary: dict[str, Any]) -> bool:
    """True where no tail of single elements, odd alignment or narrow result asks for narrower accesses."""
    narrow = binary.get("TAIL", False) or binary.get("FP8", False) or binary.get("QUANTIZE", "")
    return not narrow and binary.get("ALIGN", 16) == 16


def about_resources(binary: dict[str, Any]) -> list[str]:
    kernels.discover()
    from tunedcomm.kernels.common.launch import resident_blocks

    found = []
    if re.fullmatch(rf"sm_{binary['capability']}a?", binary["target"]) is None:
        found.append(f"is for {binary['target']!r}")
    named = binary.get("function", "") + (" NUMBERED" if binary.get("NUMBERED") else "")
    most = MAX_STACK_BYTES_OF.get(named, MAX_STACK_BYTES_OF.get(binary.get("function", ""), MAX_STACK_BYTES))
    if not moves_whole_packets(binary) and not binary.get("QUANTIZE"):
        most = MAX_STACK_BYTES_TAIL
    if "BLOCK_M" in binary:
        most = MAX_STACK_BYTES_PRODUCT[binary["capability"]]
    if binary["stack"] > most or binary["local"] > 0:
        found.append(f"spills: {binary['stack']} bytes of stack and {binary['local']} local, at most {most} and 0")
    threads = 32 * binary["num_warps"]
    if 0 < binary["elements_polled"] < threads:  # a slow warp's store may come after the reader has cleared the word
        found.append(f"{threads} threads store {binary['elements_polled']} elements that a peer polls more than once")
    if binary["elements_polled"] and "GROUP" in binary and binary["elements_a_thread"] != 1:
        found.append("packets that share a polled word may belong to several warps")
    if resident_blocks(binary["reg"], binary["shared"], threads, NUM_SMS, SHARED_OF_SM) < NUM_SMS:
        found.append(f"{threads} threads of {binary['reg']} registers do not fit on an SM")
    return found


def about_accesses(binary: dict[str, Any]) -> list[str]:
    opcodes = binary["instructions"]
    found: list[str] = []
    if "BLOCK" not in binary:  # it exchanges flags only
        return found
    # Chunks that begin anywhere are read by narrower loads where the peers' inputs are read, and with nothing staged
    # written by narrower stores too.
    staged = binary.get("ALIGN", 16) == 16 or not binary.get("SYMMETRIC", False)
    for kind in ("ld", "st") if binary.get("ALIGN", 16) == 16 else ("st",) if staged else ():
        if not any(re.fullmatch(rf"(multimem\.)?{kind}\.(\w+\.)*global\.v4\.[uf]32", opcode) for opcode in opcodes):
            found.append(f"no 16-byte {kind} among {sorted(opcodes)}")
    narrow = {op for op in opcodes if re.fullmatch(r"(ld|st)\.global\.(v2\.)?[bus](8|16|32)", op)}
    # Ids, counts, LSEs and scales are words.
    by_words = {"TOPK", "HEADS", "WIRE"} & set(binary) or binary["op"] in ("all_gather_v", "reduce_scatter_v")
    if narrow and moves_whole_packets(binary) and not by_words:
        found.append(f"moves full packets by {sorted(narrow)}")
    return found


def about_arithmetic(binary: dict[str, Any]) -> list[str]:
    opcodes = binary["instructions"]
    wrong = [op for op in opcodes if ".ftz" in op or op.startswith("fma")]
    # Without a rounding mode the assembler may contract an addition with a multiplication.
    wrong += [op for op in opcodes if re.match(r"(add|sub|mul|div)\.", op) and ".f" in op and ".rn." not in op]
    return [f"does not keep the bits of an fp32 sum: {sorted(wrong)}"] if wrong else []


def about_multimem(binary: dict[str, Any]) -> list[str]:
    found = []
    opcodes = {op for op in binary["instructions"] if op.startswith("multimem.")}
    payloads = {"bfloat16": "acc::f32.v4.bf16x2", "float16": "acc::f32.v4.f16x2", "float32": "v4.f32"}
    expected = set()
    if binary["variant"].startswith("multimem") and "DTYPE" in binary:
        expected.add(f"multimem.ld_reduce.relaxed.sys.global.add.{payloads[binary['DTYPE']]}")
    if binary["variant"] == "multimem_two_shot" or (binary["variant"] == "multimem" and "DTYPE" not in binary):
        expected.add("multimem.st.relaxed.sys.global.v4.f32")
    if opcodes != expected:
        found.append(f"has {sorted(opcodes)}, not {sorted(expected)}")
    if ("griddepcontrol.wait" in binary["instructions"]) != binary["launch_pdl"]:
        found.append("waits for the kernel before it, or not, against launch_pdl")
    return found


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("version", ["newest", pytest.param("oldest", marks=pytest.mark.slow)])
def test_every_variant_compiles(version: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    kept = getattr(pytestconfig, "cache", None)  # not there under `-p no:cacheprovider`
    if QUICK:
        what, least, generations = ("few", "0", "12"), 5, {90}
    elif FULL:
        what, least, generations = ("compile", "0", "1"), 120, {90, 100}
    elif version == "newest":
        what, least, generations = ("sample", "0", "1"), 100, {90, 100}
    else:
        what, least, generations = ("few", "0", "1"), 40, {90}
    binaries = run_corners(version, kept.mkdir("triton") if kept else tmp_path, *what)
    assert len(binaries) >= least
    assert {binary["capability"] for binary in binaries} >= generations
    wrong = [(found, {**binary, "instructions": None}) for binary in binaries if (found := complaints(binary))]
    assert wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("version", ["newest", "oldest"])
def test_products_of_fp8_are_added_in_fp32(version: str, tmp_path: Path) -> None:
    """sm_90 adds them to about 14 bits: every 128 of them, as cuBLAS does, go to a sum of their own.

    A tile has 32 elements a thread, and a step of the loop 256 fp8 products of each.
    """
    found = run_corners(version, tmp_path, "sums")
    sums = {(binary["dtype"], binary["sums"]) for binary in found}
    assert sums == {("bfloat16", 0), ("float8_e4m3fn", 2 * 32)}
    assert len(found) == 6
    assert all(binary["products"] == 8 for binary in found)


@pytest.mark.parametrize("version", ["newest", "oldest"])
def test_kernels_import_without_a_gpu_and_hash_alike_in_every_process(version: str, tmp_path: Path) -> None:
    """A row that was measured under one Triton must serve under another, and be explained where there is no GPU.

    Here kernels are interpreted, there they are compiled; Python's own hashes differ, too.
    """
    (listed,) = run_corners(version, tmp_path, "list")
    kernels.discover()
    every = [variant for op in ops() for variant in variants(op).values() if variant.kernels]
    here = {f"{variant.op}.{variant.name}": kernels.source_hash(variant) for variant in every}
    assert listed["variants"] == here
    if version == "oldest":
        lower = re.search(r'"triton>=([\d.]+)', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
        assert f"{listed['triton']}.".startswith(f"{lower[1]}."), "the Makefile installs another oldest Triton"
        assert Path(listed["file"]).is_relative_to(OLDEST)


KEYS = """
import sys
from tunedcomm.kernels.common import launch
from tunedcomm.kernels.moe import push
for name in sys.argv[1:]:
    launch._settle_key(getattr(push, name))
print(push.dispatch_kernel.cache_key)
"""


@pytest.mark.parametrize("version", ["newest", "oldest"])
def test_a_process_finds_what_others_compiled_in_another_order(version: str) -> None:
    orders = (["dispatch_kernel"], ["count_kernel", "dispatch_kernel"])
    found = {python("-c", KEYS, *names, paths=paths_of(version), TRITON_INTERPRET="0").stdout for names in orders}
    assert len(found) == 1
