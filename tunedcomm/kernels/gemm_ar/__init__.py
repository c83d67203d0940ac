"""The op gemm_ar and its variants."""
