"""Settings that must be in place before torch is imported, in each worker and each process of a test."""

import os

# CPU results in fp32 depend on the alignment of an operand otherwise, and tests compare bit for bit.
os.environ["MKL_CBWR"] = "COMPATIBLE"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

import torch
from hypothesis import settings

torch.set_num_threads(1)

# Other work may share the cores: no deadline. The same examples in every run: a red run can be repeated.
settings.register_profile("omni_offload", deadline=None, derandomize=True)
settings.load_profile("omni_offload")
