"""Megatron-core is prepared for the CPU once, in the parent that every gloo world is forked from."""

import torch

from rlite.device import DeviceKind
from rlite.megatron.bootstrap import bootstrap

bootstrap(DeviceKind.CPU)
torch.set_num_threads(1)
