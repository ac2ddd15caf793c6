"""A pytest plugin (`-p tests.gpu.without_cudnn`) for memcheck: PyTorch attends without cuDNN.

The oracle is PyTorch's attention. cuDNN's kernel reads a mask in pairs of 16-bit numbers, so with
an odd number of them it reads two bytes past its end: PyTorch's allocator rounds each
tensor up to 512 bytes and nothing happens, but memcheck sees each tensor alone, and the process
ends.
"""

import torch

torch.backends.cuda.enable_cudnn_sdp(False)
