import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton: there may be no GPU

import torch

torch.set_num_threads(1)  # two test processes share two cores
