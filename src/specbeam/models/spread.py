"""Tensor parallelism: a target whose weights are sharded over the processes of torchrun."""

import atexit
import os
import signal
import sys
import threading
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from specbeam.core.errors import BadSetting, UnsupportedModel
from specbeam.models.checkpoints.pretrained import open_checkpoint, pretrained
from specbeam.models.huggingface import prepare_to_score

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specbeam.engines.torch.repeated import Channel

_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # set by torchrun


def spread_model(name: str, dtype: "str | torch.dtype", device: torch.device) -> "PreTrainedModel":
    """Load this rank's shard of a model, and return it on rank 0.

    The other ranks follow rank 0 until it ends, and then end with `SystemExit`. If a rank is lost, all ranks end within the
    timeout.

    Raises:
        BadSetting: torchrun has not started this process.
        MissingFile, BadCheckpoint: the model cannot be loaded.
        UnsupportedModel: transformers has no tensor-parallel plan for the model, or it is not a causal decoder.
    """
    from specbeam.engines.torch.repeated import TIMEOUT_S, Channel, Follower, end_job  # imports transformers

    missing = [one for one in _RANKS if one not in os.environ]
    if missing:
        raise BadSetting(
            f"tensor_parallel needs processes started by torchrun, and {missing[0]} is not set; run torchrun "
            "--nproc-per-node 2 -m specbeam ... --tensor-parallel"
        )
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=TIMEOUT_S))
    model = _part_of(name, dtype, on_gpu)
    if dist.get_rank() == 0:
        return model
    if threading.current_thread() is threading.main_thread():
        # torchrun and terminals send signals to all ranks: rank 0 finishes its passes, for which it needs this rank.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    try:
        Follower(model, Channel()).follow()
    except Exception as error:
        end_job("following rank 0", error)
    _leave()
    raise SystemExit(0)


def _part_of(name: str, dtype: "str | torch.dtype", on_gpu: bool) -> "PreTrainedModel":
    from transformers.distributed import DistributedConfig

    if dtype == "auto" and not on_gpu:
        dtype = torch.float32
    plan = DistributedConfig(tp_size=dist.get_world_size())
    what = f"could not shard a causal language model from {name}"
    model: PreTrainedModel = pretrained(open_checkpoint(name), what, dtype=dtype, distributed_config=plan)
    prepare_to_score(model)
    if not any(hasattr(weight, "to_local") for weight in model.parameters()):
        raise UnsupportedModel(
            f"transformers has no tensor-parallel plan for {type(model).__name__}; load it on one device, or with device_map"
        )
    return model


def end_together(channel: "Channel") -> None:
    """End the other ranks when the process of rank 0 ends."""

    def end() -> None:
        sys.stdout.flush()
        channel.close()
        _leave()

    atexit.register(end)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
