"""One process a node that writes down, every few seconds, what the job does with its CPUs, memory, links and GPUs.

It never imports torch, asks the kernel and NVML alone, and appends to files that are complete to the last sample
whatever ends it.
"""

from srunddp.monitor.sampler.loop import SamplerConfig
from srunddp.monitor.sampler.process import Sampler, start

__all__ = ["Sampler", "SamplerConfig", "start"]
