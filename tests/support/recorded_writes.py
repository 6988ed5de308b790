"""Stacks of ranks as faulthandler has written them, with torch 2.13 and Gloo. Only the folders are
changed.
"""

TORCH = "/data/lib/python3.11/site-packages/torch"

ALL_REDUCE = f"""Stack (most recent call first):
  File "{TORCH}/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "{TORCH}/distributed/c10d_logger.py", line 83 in wrapper
  File "/data/train.py", line 10 in train
  File "/data/train.py", line 18 in <module>
"""

LOAD_BATCH = """Stack (most recent call first):
  File "/data/train.py", line 7 in load_batch
  File "/data/train.py", line 9 in train
  File "/data/train.py", line 18 in <module>
"""

BACKWARD = f"""Stack (most recent call first):
  File "{TORCH}/autograd/graph.py", line 979 in _engine_run_backward
  File "{TORCH}/autograd/__init__.py", line 395 in backward
  File "{TORCH}/_tensor.py", line 623 in backward
  File "/data/train.py", line 9 in train
  File "/data/train.py", line 15 in <module>
"""
