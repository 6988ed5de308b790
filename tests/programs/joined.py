"""Prints the time when this rank has joined and the first all-reduce is done."""

import os
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
print(time.time(), flush=True)
os._exit(0)
