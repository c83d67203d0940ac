"""The op gemm_rs and its variants."""
