"""PyTorch's side: operators, gradients, interception, compilers."""

import tunedcomm.kernels  # noqa: F401 - chooses Triton's interpreter before a module here imports Inductor
