"""Finds environment variables that are most likely misspelt variables of NCCL, because NCCL
silently ignores a variable that it does not know.
"""

import difflib

# Environment variables of NCCL, without the leading NCCL_: the ones that clusters and jobs usually
# set, from docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html.
_NAMES = """
ALGO BUFFSIZE COLLNET_ENABLE COMM_ID CONF_FILE CROSS_NIC CUMEM_ENABLE CUMEM_HOST_ENABLE DEBUG
DEBUG_FILE DEBUG_SUBSYS DMABUF_ENABLE ENV_PLUGIN GRAPH_DUMP_FILE GRAPH_DUMP_FILE_RANK GRAPH_FILE
IB_ADAPTIVE_ROUTING IB_ADDR_FAMILY IB_ADDR_RANGE IB_AR_THRESHOLD IB_DISABLE IB_ECE_ENABLE IB_FIFO_TC
IB_GID_INDEX IB_HCA IB_MERGE_NICS IB_MERGE_VFS IB_PCI_RELAXED_ORDERING IB_PKEY IB_QPS_PER_CONNECTION
IB_RETRY_CNT IB_ROCE_VERSION_NUM IB_SL IB_SPLIT_DATA_ON_QPS IB_TC IB_TIMEOUT IB_USE_INLINE
IGNORE_CPU_AFFINITY MNNVL_ENABLE NET NET_GDR_C2C NET_GDR_LEVEL NET_GDR_READ NET_MERGE_LEVEL
NET_PLUGIN NSOCKS_PERTHREAD NTHREADS NVB_DISABLE NVLS_ENABLE NVTX_DISABLE OOB_NET_ENABLE
OOB_NET_IFNAME P2P_DISABLE P2P_DIRECT_DISABLE P2P_LEVEL PROFILER_PLUGIN PROTO PXN_DISABLE
SHM_DISABLE SOCKET_FAMILY SOCKET_IFNAME SOCKET_NTHREADS SOCKET_RETRY_CNT SOCKET_RETRY_SLEEP_MSEC
TOPO_DUMP_FILE TOPO_FILE TUNER_PLUGIN
"""
_KNOWN = frozenset(f"NCCL_{name}" for name in _NAMES.split())


def misspelt(name: str) -> str:
    """Return the variable of NCCL for which ``name`` is most likely a misspelling; empty if
    ``name`` is a variable of NCCL itself, or resembles none.
    """
    if not name.startswith("NCCL_") or name in _KNOWN:
        return ""
    # NCCL has IB_DISABLE but NVLS_ENABLE, so users mix up the two endings. difflib alone would take
    # NCCL_IB_ENABLE for NCCL_IB_ECE_ENABLE, and would find nothing near NCCL_SHM_ENABLE.
    swapped = {name.replace("_ENABLE", "_DISABLE"), name.replace("_DISABLE", "_ENABLE")} & _KNOWN
    return next(
        iter([*swapped, *difflib.get_close_matches(name, sorted(_KNOWN), n=1, cutoff=0.85)]), ""
    )
