"""Has each rank call the next by torch's RPC, and reports the answer and the interface."""

import json
import os

import torch
import torch.distributed.rpc as rpc

rank = int(os.environ["RANK"])
size = int(os.environ["WORLD_SIZE"])
rpc.init_rpc(
    f"worker{rank}",
    rank=rank,
    world_size=size,
    rpc_backend_options=rpc.TensorPipeRpcBackendOptions(rpc_timeout=60.0),
)
answer = rpc.rpc_sync(f"worker{(rank + 1) % size}", torch.add, args=(torch.ones(1), rank))
report = {"rank": rank, "answer": answer.item(), "interface": os.environ["TP_SOCKET_IFNAME"]}
print(json.dumps(report), flush=True)
rpc.shutdown()
